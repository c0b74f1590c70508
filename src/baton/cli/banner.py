"""The text that `baton serve`, `up` and `router` print when they are ready. GET /config has every detail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import __version__
from baton.config import ServeConfig

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady

Row = tuple[str, str]
KV_BITS = {"int8": "8-bit", "fp8": "8-bit (fp8)", "float16": "16-bit", "bfloat16": "16-bit", "float32": "32-bit"}
DEVICES = {"cpu": "on the CPU", "cuda": "on the GPU"}


def banner(headline: str, rows: Iterable[Row], config: ServeConfig) -> str:
    lines = [f"Baton {__version__} {headline}", *(f"  {what:<10} {value}" for what, value in rows)]
    if advice := _advice(config):
        lines.append(advice)
    return "\n".join([*lines, "Ctrl-C ends it."])


def _advice(config: ServeConfig) -> str:
    from baton.models.aliases import packaged_model_at

    path = Path(config.model)
    model = packaged_model_at(path) if path.is_file() else None
    return "" if model is None or not model.advice else f"{config.served_model_name[0]} is {model.advice}"


def base_url(config: ServeConfig, host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"{config.scheme}://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{port}"


def api_rows(config: ServeConfig, ready: InstanceReady) -> list[Row]:
    url = base_url(config, config.host, config.port)
    return [*([("chat page", f"{url}/")] if config.chat_page and ready.generates else []), ("API", f"{url}/v1")]


def try_row(config: ServeConfig, ready: InstanceReady) -> Row:
    route, fields = _example(ready)
    body = json.dumps({"model": config.served_model_name[0], **fields})
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    url = base_url(config, config.host, config.port)
    return "try", f"curl {url}{route} -H 'Content-Type: application/json'{key} -d '{body}'"


def _example(ready: InstanceReady) -> tuple[str, dict[str, Any]]:
    """An example of a request that the model answers."""
    if ready.generates:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    if len(ready.labels) == 1:
        return "/v1/rerank", {"query": "Who runs?", "documents": ["A runner.", "A stone."]}
    return ("/classify" if ready.labels else "/v1/embeddings"), {"input": "Hello"}


def model_rows(config: ServeConfig, ready: InstanceReady, *, each: str = "") -> list[Row]:
    """The rows about the model. `each`: suffix of the values that every instance of a cluster has for itself."""
    tokens, plan = ready.blocks * ready.block_size, ready.plan
    where = ", ".join(str(word) for word in (plan.get("weights", ""), DEVICES.get(str(plan.get("device")), "")) if word)
    if not ready.generates:
        kind = f"{len(ready.labels)} classes" if len(ready.labels) > 1 else "scores of pairs" if ready.labels else "vectors"
        words = f"an encoder, for {kind}; texts of {ready.context_tokens - 1:,} tokens"
        return [("model", f"{where}; {words}" if where else words), ("at once", f"{ready.slots} requests{each}")]
    context = f"{ready.context_tokens:,} tokens of context"
    bits = KV_BITS.get(str(plan.get("kv_cache_dtype")), "")
    size = f" ({_size(float(plan['kv_pool_gib']))})" if "kv_pool_gib" in plan else ""
    return [
        ("model", f"{where}; {context}" if where else context),
        ("memory", f"{bits} KV cache for {tokens:,} tokens{size}{each}".strip()),
        *([("drafts", draft_text(plan))] if "draft_model" in plan else ()),
        ("at once", f"{ready.slots} requests{each}"),
    ]


def draft_text(plan: Mapping[str, int | float | str]) -> str:
    """The draft model and the memory of its KV cache, as text."""
    beside = "beside --kv-blocks" if plan["kv_blocks_by"] == "kv_blocks" else "of its own"
    return f"{Path(str(plan['draft_model'])).name}, with {_size(float(plan['draft_kv_pool_gib']))} of KV cache {beside}"


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{1024 * gib:.0f} MiB"
