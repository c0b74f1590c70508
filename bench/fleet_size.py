"""Bytes per token on a session, and the memory of a router with a full index (bench/fleet.py)."""

from __future__ import annotations

import resource
from random import Random
from typing import NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.events import InstanceJoined, InstanceMessage, Session
from baton.core.cluster.router import Router
from baton.core.kv.marks import KEY_BYTES
from baton.protocol.codec import encode
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import CACHED_KEYS_MAX, CachedKeys, InstanceHello
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest
from baton.protocol.versions import CACHED_KEYS
from fleet_traffic import CONTEXT, SIZE

BLOCKS, SLOTS = 4096, 64


def hello_of(number: int, capabilities: tuple[str, ...]) -> InstanceHello:
    ready = InstanceReady(BLOCKS, SIZE, SLOTS, 150_000, CONTEXT, identity=b"m")
    return InstanceHello(f"i{number}", 1, "mixed", ready, b"l", capabilities=capabilities)


class TokenBytes(NamedTuple):
    prompt: float
    answer: float


def token_bytes() -> TokenBytes:
    """Bytes per token in a GenerateRequest of 1,000 tokens, and in an Emit with 64 rows."""
    rng, rows = Random(1), 64
    prompt = tuple(rng.randrange(150_000) for _ in range(1000))
    request = GenerateRequest(id=RequestId("r1234567"), prompt=prompt)
    emit = Emit([(RequestId(f"r{1234567 + row}"), 1, 0, 100, rng.randrange(150_000)) for row in range(rows)], [])
    return TokenBytes(len(encode(request)) / 1000, len(encode(emit)) / rows)


def memory(instances: int, keys_max: int) -> tuple[int, float]:
    """Entries of the full index of a router, and the MiB of its process. Every key is that of two instances: a set of two takes
    more memory than two keys with one holder each."""
    router, rng = Router(RouterConfig(instances_max=instances, prefix_keys_max=keys_max)), Random(1)
    share = max(1, keys_max // instances)
    for number in range(instances):
        router.handle(InstanceJoined(Session(number), hello_of(number, (CACHED_KEYS,))), Instant(0.0))
    for number in range(instances):
        rng.seed(number // 2)
        for begin in range(0, share, CACHED_KEYS_MAX):
            keys = rng.randbytes(KEY_BYTES * min(CACHED_KEYS_MAX, share - begin))
            router.handle(InstanceMessage(Session(number), CachedKeys(begin == 0, keys)), Instant(0.1))
    return len(router.membership.index), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
