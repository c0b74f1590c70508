"""Names of settings that users of other engines type (vLLM, SGLang, llama.cpp, FastDeploy): on the command line, in a file, or
as keywords of `LLM`. One table for all three.

FAMILIAR      another name of a setting of ours, with the same meaning
NOT_NEEDED    means nothing here, whatever its value: accepted, and a line says why
ONLY_ONE      accepted where it is 1
INSTEAD       refused, with what there is in its place; accepted where its value asks for nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

FAMILIAR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("model_path",),
        "served_model_name": ("alias",),
        "max_model_len": ("context_tokens_max", "ctx_size", "context_length"),
        "max_num_seqs": ("slots", "max_running_requests", "parallel"),
        "max_num_batched_tokens": ("tokens_per_step",),
        "chunk_tokens_max": ("chunked_prefill_size",),
        "kv_blocks": ("num_blocks", "num_gpu_blocks_override"),
        "gpu_memory_utilization": ("memory_utilization", "mem_fraction_static"),
        "kv_cache_dtype": ("kv_dtype",),
        "enable_prefix_caching": ("prefix_caching",),
        "drain_seconds_max": ("shutdown_timeout",),
    }
)
"""By field of ServeConfig. Names that are the same here (block_size, api_key, ...) need no line."""

SHORT: Mapping[str, str] = MappingProxyType(
    {"model": "-m", "ctx_size": "-c", "parallel": "-np", "threads": "-t", "alias": "-a", "n_gpu_layers": "-ngl", "tp": "-tp"}
)
"""Letters of llama.cpp and vLLM, by the name that they are short for."""

_ALWAYS = "it is always done"
_ONE_WAY = "there is one way, and it is taken where it helps"

NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "trust_remote_code": "code of a model's repository is never run",
        "enforce_eager": _ONE_WAY,
        "disable_custom_all_reduce": _ONE_WAY,
        "disable_cuda_graph": _ONE_WAY,
        "enable_torch_compile": _ONE_WAY,
        "attention_backend": _ONE_WAY,
        "flash_attn": _ONE_WAY,
        "tokenizer_mode": _ONE_WAY,
        "max_seq_len_to_capture": _ONE_WAY,
        "cuda_graph_max_bs": _ONE_WAY,
        "guided_decoding_backend": _ONE_WAY,
        "use_cudagraph": _ONE_WAY,
        "use_warmup": _ALWAYS,
        "enable_chunked_prefill": _ALWAYS,
        "enable_auto_tool_choice": _ALWAYS,
        "enable_metrics": _ALWAYS,
        "metrics": _ALWAYS,
        "cont_batching": _ALWAYS,
        "jinja": _ALWAYS,
        "mlock": "weights are read into memory",
        "n_gpu_layers": "all layers are on the device that --device names",
        "disable_log_requests": "no prompt and no answer is logged",
        "disable_log_stats": "figures are at /metrics, and not in the log",
        "max_logprobs": "a request may ask for 20",
        "cache_queue_port": "processes of one server need no ports",
        "engine_worker_queue_port": "processes of one server need no ports",
    }
)
"""With the reason."""

ONLY_ONE = ("tensor_parallel_size", "tp_size", "tp", "pipeline_parallel_size", "pp_size", "data_parallel_size", "dp_size", "dp")

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "swap_space": "KV blocks are kept in host memory with --kv-host-gib",
        "splitwise_role": "prefill and decode instances have --role (docs/cluster.md)",
        "disaggregation_mode": "prefill and decode instances have --role (docs/cluster.md)",
        "kv_transfer_config": "prefill and decode instances have --role (docs/cluster.md)",
        "kvcache_storage_backend": "KV blocks are stored with --kv-storage (docs/caching.md)",
        "disable_radix_cache": "there is --no-enable-prefix-caching",
        "schedule_policy": "there is --order",
        "scheduling_policy": "there is --order",
        "max_concurrency": "there is streams in --limits",
        "no_webui": "there is --no-chat-page",
        "enable_lora": "LoRA adapters are not supported yet",
        "lora_modules": "LoRA adapters are not supported yet",
        "lora_paths": "LoRA adapters are not supported yet",
        "lora": "LoRA adapters are not supported yet",
        "tokenizer": "the tokenizer comes with the model",
        "speculative_config": "speculative decoding is not supported yet",
        "speculative_algorithm": "speculative decoding is not supported yet",
        "model_draft": "speculative decoding is not supported yet",
        "enable_expert_parallel": "a model runs on one GPU (docs/gpu.md)",
        "cpu_offload_gb": "all weights are on one device",
        "mmproj": "only text is supported",
        "enable_mm": "only text is supported",
    }
)
"""With what there is."""

FLAGS = frozenset(
    {
        "trust_remote_code",
        "enforce_eager",
        "disable_custom_all_reduce",
        "disable_cuda_graph",
        "enable_torch_compile",
        "use_warmup",
    }
    | {"enable_chunked_prefill", "enable_auto_tool_choice", "enable_metrics", "metrics", "cont_batching", "jinja", "mlock"}
    | {"disable_log_requests", "disable_log_stats", "disable_radix_cache", "no_webui", "enable_lora", "enable_expert_parallel"}
    | {"enable_mm", "use_cudagraph"}
)
"""Of the strangers, those without a value on a command line."""

STRANGERS = (*NOT_NEEDED, *ONLY_ONE, *INSTEAD)
"""Names that are no setting here."""


class Verdict(NamedTuple):
    taken: Literal["not needed", "refused"]
    words: str


def verdict_on(name: str, value: object) -> Verdict | None:
    """What becomes of a setting that is none of ours. None: no engine is known to have it."""
    if name in NOT_NEEDED:
        return Verdict("not needed", f"is not needed here: {NOT_NEEDED[name]}")
    if name in ONLY_ONE:
        one = str(value).strip() == "1"
        return Verdict("not needed", "is not needed here: there is one") if one else Verdict("refused", _ONE_GPU)
    if name in INSTEAD:
        if value in (None, False, 0, 0.0, "0", "", ()):
            return Verdict("not needed", "asks for nothing")
        return Verdict("refused", f"is no setting here: {INSTEAD[name]}")
    return None


_ONE_GPU = "must be 1: a model runs on one GPU (docs/gpu.md)"
