"""What a server with a cache service really takes of a GPU, against what its start measured and set aside for it.

The worker measures weights, graphs, tables and the largest step; the KV pool gets the rest of the share, less ATTACHER_GIB for
the cache service, which maps the pool later and has a CUDA context of its own.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_model import make_model
from chaos_server import USUAL, Server, until
from test_shared_gpu import LARGE
from test_tiers import prompt, settled

from baton.kvpool.memory import GIB
from baton.worker.platforms.choose import ATTACHER_GIB

torch = pytest.importorskip("torch")

SHARE = 0.95
TOLERATED_BYTES = GIB // 4
"""What the driver rounds and keeps, beyond what it had when memory was measured: as in tests/gpu/test_memory_budget.py."""
MANY_LAYERS = {**LARGE, "num_hidden_layers": 32, "hidden_size": 256, "intermediate_size": 512}
WORDS = 2000
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "deterministic": False, "slots": 256, "tokens_per_step": 8192, "block_size": 128,
    "gpu_memory_utilization": SHARE, "kv_host_gib": 2.0,
}  # fmt: skip


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def values_of(tree: object, name: str) -> list[float]:
    if not isinstance(tree, dict):
        return []
    found = [tree[name]] if name in tree else []
    return [*found, *(value for part in tree.values() for value in values_of(part, name))]


def use(server: Server) -> None:
    """Steps with prompts, with decodes of several sequences that ask for all, and copies to the host tier."""
    body = {"model": "tiny", "prompt": prompt(1, words=WORDS), "max_tokens": 32, "n": 16, "temperature": 0.9, "top_p": 0.9}
    reply = server.ask("/v1/completions", {**body, "logprobs": 5, "repetition_penalty": 1.1, "ignore_eos": True})
    assert reply.status == 200, reply.content
    settled(server, "device_to_host")


def bytes_of_the_cache_service(server: Server) -> int:
    """What is free once it is killed. Its engine is stopped meanwhile: it would start another one."""
    engine, cache, before = server.process("engine"), server.process("cache"), used_bytes()
    engine.send(signal.SIGSTOP)
    try:
        cache.send(signal.SIGKILL)
        until(lambda: not cache.alive and used_bytes() < before - GIB // 8, "its memory is free", 20.0)
        until(lambda: steady(used_bytes()), "the driver has released all of it", 20.0)
        after = used_bytes()
    finally:
        engine.send(signal.SIGCONT)
    until(lambda: server.metrics()["baton:kv_service_up"] == 1, "another service takes moves")
    return before - after


def steady(used: int) -> bool:
    return all(used_bytes() == used for _ in range(200))


@pytest.mark.timeout(240)
def test_graphs_tables_and_the_cache_service_are_inside_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(USUAL, "kv_blocks")
    model = make_model(tmp_path / "model", max_position_embeddings=32768, **MANY_LAYERS)
    before, (_, total) = used_bytes(), torch.cuda.mem_get_info()
    with Server(model, tmp_path / "server", **SETTINGS).wait_ready() as server:
        ready = used_bytes()
        use(server)
        busy, plan = used_bytes(), server.ask("/config").json
        pool, used, step = (max(values_of(plan, name)) * GIB for name in ("kv_pool_gib", "memory_used_gib", "memory_step_gib"))
        service = bytes_of_the_cache_service(server)
        again = used_bytes()
        use(server)
    worker = busy - service - pool
    figures = {
        "total": total, "used before": before, "ready": ready, "busy": busy, "busy with its next cache service": again,
        "KV pool": pool, "worker and others": worker, "as measured at the start": used + step, "cache service": service,
    }  # fmt: skip
    print("GiB:", ", ".join(f"{name} {count / GIB:.3f}" for name, count in figures.items()))
    assert pool > 0.5 * total, "the pool takes what is left, so that a mistake shows"
    assert service <= ATTACHER_GIB * GIB, "as much was set aside for it"
    assert worker <= used + step + TOLERATED_BYTES, "graphs, tables and the step are what was measured"
    for at in (ready, busy, again):
        assert (SHARE - 0.03) * total <= at <= SHARE * total + TOLERATED_BYTES
