"""A session that knows the secret and sends numbers that mean nothing: it may end, and nothing else may.

The router is the real RouterClient over real sessions. One instance is honest; another sends hellos, heartbeats, stats, offers
and so on in which some values are replaced by values at the edges of what a wire can carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import msgspec
import pytest
from client_pair import Asked
from link_rig import SECRET, Door
from run_loop import finish

from baton.config import RouterConfig
from baton.core.cluster.router import Router
from baton.errors import EngineError
from baton.protocol.codec import Message, encode
from baton.protocol.control import InstanceReady, InstanceStats, ModeReport, OrderAnswer, Pong, RefusedRequest
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved, request_of
from baton.protocol.ids import PoolIncarnation, RequestId
from baton.protocol.instance import Build, CachedKeys, Heartbeat, InstanceHello, InstanceRefused, RouterHello
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused, SamplingParams
from baton.protocol.versions import CACHED_KEYS
from baton.runtime.router.router_client import RouterClient
from baton.runtime.wire.link import Link, dial

READY = InstanceReady(64, 16, 8, 300, 512, 512, identity=b"weights", identity_parts={"weights": "12"})
EDGES: list[Any] = [
    0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 5e-324, -1.5, 1e308, math.inf, -math.inf, math.nan,
    "", "\n", "a\nb", "x" * 300, b"", b"\xff" * 33, None, True, [], [[]], {}, {"": 0},
]  # fmt: skip
TOKENS = 6


def token(position: int) -> int:
    """Of every answer: whichever instance computes it."""
    return 100 + position


def hello(name: str, role: str = "mixed", *capabilities: str) -> InstanceHello:
    peers = (f"/peer/{name}",)
    return InstanceHello(name, 1, role, READY, b"layout", peers, capabilities=capabilities, build=Build("1"))  # type: ignore[arg-type]


class Honest:
    """Serves whole requests, a token at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        self._link.send(hello("honest"))
        beating = asyncio.create_task(self._beat())
        try:
            while (message := await self._link.receive()) is not None:
                if isinstance(message, GenerateRequest):
                    self._tasks.append(asyncio.create_task(self._answer(message)))
        finally:
            for task in (beating, *self._tasks):
                task.cancel()

    async def _beat(self) -> None:
        while True:
            self._link.send(Heartbeat("", 0.001, 64, 8))
            await asyncio.sleep(0.05)

    async def _answer(self, request: GenerateRequest) -> None:
        told = len(request.delivered(0))
        for position in range(told, request.sampling.max_tokens):
            self._link.send(Emit([(request.id, request.attempt, 0, position, [token(position)])], []))
            await asyncio.sleep(0)
        last = Ended(request.id, 0, FinishReason.LENGTH, 3, 0, request.sampling.max_tokens, 0, attempt=request.attempt)
        self._link.send(Emit([], [last]))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, each in inner for leaf in leaves(each, (*path, key))]
    return [*found, path] if path else found


def distorted(message: Message, rng: Random) -> bytes:
    """A frame of the message, in which some values are others."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(message), strict=False)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *parents, last = rng.choice(leaves(value)) or (None,)
        place = value
        with contextlib.suppress(KeyError, IndexError, TypeError):  # its parent was replaced before
            for key in parents:
                place = place[key]
            place[last] = rng.choice(EDGES)
    body = msgspec.msgpack.encode(value)
    return encode(message)[:4] + len(body).to_bytes(4, "big") + body


def messages_of(request: GenerateRequest | None) -> list[Message]:
    name, attempt = (RequestId("r"), 1) if request is None else (request.id, request.attempt)
    return [
        Heartbeat("", 0.001, 64, 8, 5, 1, False, (name,)),
        InstanceStats(blocks_total=64, steps=9, ended={"stop": 1}, tiers={"stored": 2}),
        Offer(name, attempt, PoolIncarnation(7), 0, (1, 2), 32, True, 16, 8, 0),
        Adopted(name, attempt, 32),
        Reserved(name, attempt, 16),
        Release(name, attempt),
        Released(name, attempt, True),
        RefusedRequest(name, Refused("no_room", 4, 2), attempt),
        Emit([], [Ended(name, 0, FinishReason.ERROR, 3, 0, 0, 0, "worker_gone", attempt=attempt)]),
        ModeReport("serving"),
        Pong(1),
        OrderAnswer(1, "done"),
        CachedKeys(True, bytes(12), bytes(6)),
    ]


NO_TOKEN = (2**31, 2**63 - 1, 2**64 - 1, -1, -(2**63), 0.5, math.nan, None, "5", [])


def row_without_a_token(request: GenerateRequest, rng: Random) -> bytes:
    """The next row of an answer, with something in place of its token that is none."""
    position = len(request.delivered(0))
    whole = encode(Emit([(request.id, request.attempt, 0, position, [token(position)])], []))
    body = msgspec.msgpack.encode([[[request.id, request.attempt, 0, position, [rng.choice(NO_TOKEN)]]], [], [], []])
    return whole[:4] + len(body).to_bytes(4, "big") + body


async def disturb(link: Link, rng: Random) -> bool:
    """One session of the other instance. True: the router took its hello."""
    with contextlib.suppress(Exception):
        role = rng.choice(("mixed", "prefill", "decode"))
        capabilities = (CACHED_KEYS,) if rng.random() < 0.8 else ()
        whole = encode(hello(f"odd-{rng.randrange(3)}", role, *capabilities))
        link._frames.write(distorted(hello("odd", role), rng) if rng.random() < 0.4 else whole)
        async with asyncio.timeout(5):
            if not isinstance(await link.receive(), RouterHello):
                return False
        link.send(Heartbeat("", 0.001, 64, 8))
        given: GenerateRequest | None = None
        for _ in range(12):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    message = await link.receive()
                    if message is None or isinstance(message, InstanceRefused):
                        break
                    given = request_of(message) or given
            if given is not None and rng.random() < 0.2:
                link._frames.write(row_without_a_token(given, rng))
                continue
            said = rng.choice(messages_of(given))
            link._frames.write(distorted(said, rng) if rng.random() < 0.6 else encode(said))
    return True


@contextlib.asynccontextmanager
async def cluster(**settings: float) -> AsyncIterator[tuple[RouterClient, Door]]:
    config = RouterConfig(handoff_tokens_min=0, **settings)
    client = RouterClient(Router(config), config)
    serving: list[asyncio.Task[None]] = []

    def on_link(link: Link, peer: str) -> None:
        serving.append(asyncio.create_task(client.serve_instance(link)))

    async with Door(on_link=on_link) as door:
        try:
            yield client, door
        finally:
            client.close()
            await asyncio.gather(*serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def honest_instance(door: Door, client: RouterClient) -> AsyncIterator[None]:
    """It joins, and dials again where it is refused, as while another instance may come back."""

    async def keep_joining() -> None:
        while True:
            await Honest(await dial(door.address, SECRET)).run()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(keep_joining())
    try:
        async with asyncio.timeout(10):
            while not any(node.hello.name == "honest" and node.welcomed for node in client.sessions):
                await asyncio.sleep(0.002)
        yield
    finally:
        task.cancel()


def answer_of(name: str, client: RouterClient) -> Asked:
    return Asked(client, GenerateRequest(id=RequestId(name), prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=TOKENS)))


async def begin_with(distortion: tuple[int, Any]) -> None:
    """The first instance says what fits: a router that believes it must still be there for the next."""
    field, value = distortion
    async with cluster(no_instance_seconds=0.02, queue_seconds_max=0.05) as (client, door):
        link = await dial(door.address, SECRET)
        whole = msgspec.msgpack.decode(msgspec.msgpack.encode(hello("odd")))
        whole[3][field] = value
        body = msgspec.msgpack.encode(whole)
        link._frames.write(encode(hello("odd"))[:4] + len(body).to_bytes(4, "big") + body)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await link.receive()
        asked = answer_of("first", client)
        await asyncio.sleep(0.01)
        link.close()
        with contextlib.suppress(EngineError):
            await asyncio.wait_for(asked.over, 10)
        async with honest_instance(door, client):
            second = answer_of("second", client)
            async with asyncio.timeout(10):
                await second.over
            assert second.tokens == [token(place) for place in range(TOKENS)]
        assert not client.over.done(), (distortion, client.over.exception())


@pytest.mark.parametrize("field", ["blocks", "block_size", "slots", "vocab_size", "context_tokens", "model_context_tokens"])
def test_a_first_hello_of_nonsense_leaves_the_router_to_the_next(field: str):
    place = InstanceReady.__struct_fields__.index(field)
    for value in (0, -1, -(2**63), 2**64 - 1, math.nan, None):
        finish(begin_with((place, value)))


async def rehearse(seed: int, sessions: int) -> None:
    rng, count = Random(seed), 0
    async with cluster() as (client, door), honest_instance(door, client):
        for number in range(sessions):
            link = await dial(door.address, SECRET)
            odd = asyncio.create_task(disturb(link, rng))
            asked = [answer_of(f"{number}-{each}", client) for each in range(2)]
            await odd
            link.close()
            async with asyncio.timeout(20):
                for each in asked:
                    await each.over
                    assert each.tokens == [token(place) for place in range(TOKENS)], (seed, number)
                    count += 1
            assert not client.over.done(), (seed, number, client.over.exception())
        assert count == 2 * sessions
        async with asyncio.timeout(10):
            while [node.hello.name for node in client.sessions] != ["honest"]:
                await asyncio.sleep(0.005)
        client._machine.check()


@pytest.mark.parametrize("seed", range(4))
def test_only_the_session_that_sends_nonsense_ends(seed: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    finish(rehearse(seed, 15))
    assert not [record for record in caplog.records if "\n" in record.getMessage()], "names are cleaned before they are logged"


KEYS = CachedKeys(True, bytes(12), bytes(6))
ODD_KEYS = {
    "half a key": ((CACHED_KEYS,), [CachedKeys(added=bytes(9))], "malformed"),
    "half a removed key": ((CACHED_KEYS,), [KEYS, CachedKeys(removed=bytes(7))], "malformed"),
    "the same key twice": ((CACHED_KEYS,), [CachedKeys(True, bytes(48), bytes(48))], ""),
    "removed before it was added": ((CACHED_KEYS,), [CachedKeys(removed=bytes(6)), KEYS], ""),
    "without the capability": ((), [KEYS], "does not list the capability cached_keys"),
    "a flood": ((CACHED_KEYS,), [KEYS] * 100, "more than 2 times per heartbeat"),
    "a flood of snapshots with heartbeats": ((CACHED_KEYS,), [KEYS, Heartbeat("", 0.001, 64, 8)] * 100, "per heartbeat"),
}


async def send_keys(capabilities: tuple[str, ...], messages: list[Message], *, ends: bool) -> None:
    async with cluster() as (client, door), honest_instance(door, client):
        link = await dial(door.address, SECRET)
        link.send(hello("odd", "mixed", *capabilities))
        async with asyncio.timeout(5):
            await link.receive()
        for message in [Heartbeat("", 0.001, 64, 8), *messages]:
            link.send(message)
        asked = [answer_of(f"{each}", client) for each in range(2)]
        if ends:
            with contextlib.suppress(EngineError):
                async with asyncio.timeout(10):
                    while await link.receive() is not None:
                        pass
        else:
            await asyncio.sleep(0.05)
            assert sorted(node.hello.name for node in client.sessions) == ["honest", "odd"]
        link.close()
        async with asyncio.timeout(20):
            for each in asked:
                await each.over
                assert each.tokens == [token(place) for place in range(TOKENS)]
        client._machine.check()


@pytest.mark.parametrize("case", ODD_KEYS)
def test_keys_of_cached_blocks_that_an_instance_may_not_send_end_its_session(case: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    capabilities, messages, word = ODD_KEYS[case]
    finish(send_keys(capabilities, messages, ends=bool(word)))
    said = [record.getMessage() for record in caplog.records if "odd" in record.getMessage()]
    assert not word or any(word in each for each in said), said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_only_the_session_that_sends_nonsense_ends_for_longer(seed: int):
    finish(rehearse(seed, 80))
