"""A server on the GPU that sleeps gives its memory back: the engine's descriptor would keep the KV pool."""

import pytest
from chaos_server import Server, until
from test_sleeping_server import (  # noqa: F401
    post,
    test_a_server_that_slept_answers_as_before,
    tokens,
)

torch = pytest.importorskip("torch")
BLOCKS = 2**18


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("settings", [{}, {"kv_host_gib": 0.01}], ids=["alone", "with a cache service"])
def test_memory_of_the_pool_is_free_while_it_sleeps(tiny, tmp_path, settings):
    with Server(tiny, tmp_path, kv_blocks=BLOCKS, block_size=64, **settings).wait_ready() as server:
        before, plan = tokens(server), server.ask("/config").json
        pool = next(value for value in _values(plan, "kv_pool_gib")) * 2**30
        assert pool > 2**30, "large enough to be seen beside what others use"
        awake = used_bytes()
        assert post(server, "/v1/sleep", {"drain_seconds": 20})["mode"] == "asleep"
        until(lambda: awake - used_bytes() > pool, "the memory is free")
        assert post(server, "/v1/wake")["mode"] == "serving"
        assert tokens(server) == before


def _values(tree: object, name: str) -> list[float]:
    if not isinstance(tree, dict):
        return []
    found = [tree[name]] if name in tree else []
    return [*found, *(value for part in tree.values() for value in _values(part, name))]
