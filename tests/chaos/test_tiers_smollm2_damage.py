"""The real model and its stored KV, disturbed: two servers on one directory, the cache service killed in mid-flight, damaged
objects. The tokens are those of a server that caches nothing, greedy and seeded."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chaos_server import Reply, Server, ask, until
from test_tiers import by_tier, damage, moved, settled
from test_tiers_smollm2 import BODIES, SETTINGS, tokens, undisturbed

from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.files import FileBackend
from baton.kvcache.storage.object import HEADER_BYTES, described

pytestmark = pytest.mark.slow
INJECTIONS = 200
__all__ = ["undisturbed"]


def test_two_servers_on_one_directory_and_a_third_that_finds_it_damaged(smollm2_path: Path, tmp_path: Path, undisturbed):
    store = tmp_path / "kv"
    settings: dict[str, Any] = {**SETTINGS, "kv_storage": f"file:{store}", "threads": 1}
    with (
        Server(smollm2_path, tmp_path / "one", **settings) as one,
        Server(smollm2_path, tmp_path / "other", **settings) as other,
    ):
        one.wait_ready()
        other.wait_ready()

        async def both() -> list[Reply]:  # at the same time: both compute and store the same blocks
            asked = [ask(server.port, "/v1/completions", body) for body in BODIES for server in (one, other)]
            return await asyncio.gather(*asked)

        replies = asyncio.run(both())
        assert [reply.tokens[0] for reply in replies] == [owed for owed in undisturbed for _ in range(2)]
        settled(one, "host_to_storage")
        for body, owed in zip(BODIES, undisturbed, strict=True):
            other.ask("/v1/cache/clear", {})  # each time: the two begin alike
            reply = other.ask("/v1/completions", body)
            assert reply.tokens[0] == owed
            assert by_tier(reply)["storage"] > 64, by_tier(reply)
    inject(store)
    assert damage(store, 10)
    with Server(smollm2_path, tmp_path / "next", **settings).wait_ready() as after:
        assert [tokens(after, body) for body in BODIES] == undisturbed


def inject(store: Path) -> None:
    """Real blocks, damaged one at a time in every way that bytes can be, and read through the real backend."""
    files = sorted(path for path in store.rglob("*.kv"))
    random = Random(15)
    served = 0
    for number in range(INJECTIONS):
        path = random.choice(files)
        whole = path.read_bytes()
        key, layout = described(whole[:HEADER_BYTES])
        content = bytearray(whole)
        match number % 5:
            case 0:
                place = random.randrange(HEADER_BYTES, len(content))
                content[place] ^= 1 << random.randrange(8)
            case 1:
                content[random.randrange(HEADER_BYTES)] ^= 1 << random.randrange(8)
            case 2:
                del content[random.randrange(len(content)) :]
            case 3:
                content[:] = random.choice([other for other in files if other != path]).read_bytes()
            case 4:
                begin = random.randrange(HEADER_BYTES, len(content) - 512)
                content[begin : begin + 512] = random.randbytes(512)
        path.write_bytes(content)
        into = memoryview(bytearray(layout.block_bytes))
        backend = FileBackend(store, layout, 2**30)
        served += backend.get([key], [into], Deadline.after(30.0))
        backend.close()
        path.write_bytes(whole)
    assert served == 0, f"{served} of {INJECTIONS} damaged blocks were served"


def test_the_cache_service_is_killed_while_blocks_are_moved(smollm2_path: Path, tmp_path: Path, undisturbed):
    tiers = {"kv_host_gib": 0.05, "kv_storage": f"file:{tmp_path / 'kv'}"}
    with Server(smollm2_path, tmp_path / "server", **SETTINGS, **tiers).wait_ready() as server:
        assert [tokens(server, body) for body in BODIES] == undisturbed
        settled(server, "host_to_storage")
        for clear in (["device"], ["device", "host"], ["device"]):
            server.ask("/v1/cache/clear", {"tiers": clear})
            before = moved(server, "device_to_host")

            async def killed() -> list[Reply]:
                asked = asyncio.gather(*(ask(server.port, "/v1/completions", body) for body in BODIES))
                await asyncio.sleep(0)  # both are sent; the service has a load, a fetch or a store under way, or is about to
                server.process("cache").send(signal.SIGKILL)
                return await asked

            replies = asyncio.run(killed())
            assert [reply.tokens[0] for reply in replies] == undisturbed
            until(lambda: server.metrics()["baton:kv_service_up"] == 1, "another service takes moves")
            assert moved(server, "device_to_host") >= before
        reply = server.ask("/v1/completions", BODIES[0])
        assert reply.tokens[0] == undisturbed[0]
        server.wait_idle()
        assert "Traceback" not in server.errors
