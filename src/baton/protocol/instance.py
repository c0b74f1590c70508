"""Instances and routers: how they meet, and how each knows that the other lives. An instance dials; the router answers.

    instance  InstanceHello ---> router      who I am, what I compute with
    router    RouterHello -> instance    you are in; or InstanceRefused, which says why not
    both      Beat, RouterHeartbeat           several a second, also when there is nothing else to say

A session is one connection. Its messages come in order and once, or the session ends (runtime/wire/link.py). Requests end with
their session: the instance aborts the router's requests, the router replays them elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from baton.protocol.control import InstanceReady, InstanceStats
from baton.protocol.ids import RequestId
from baton.protocol.numbers import Counter, Natural, NodeName, Seconds

Role = Literal["mixed", "prefill", "decode"]


class Build(Struct, frozen=True):
    """Which program a process runs, and since when: for people (/v1/cluster) and for metrics."""

    version: str = ""
    commit: str = ""
    "Empty: not known."
    started_at: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    "Seconds since 1970, by the clock of its machine. 0: not known."


class InstanceHello(Struct, frozen=True, array_like=True):
    name: NodeName
    "Unique in the cluster; for people and for placement that lasts."
    incarnation: int
    "Drawn anew by every life of the engine."
    role: Role
    ready: InstanceReady
    layout: bytes
    "Fingerprint of a KV block's layout: a hand-off copies bytes."
    peers: tuple[str, ...] = ()
    """For each rank (one today), where its messenger lets others read its pool: addresses with blanks between them, the best
    first. Empty: nowhere."""
    health_url: str = ""
    "Of its own HTTP, for people, as they reach it from the router's machine. Empty: they do not."
    pid: Natural = 0
    "Of its engine, for people on the same machine."
    adopt_seconds_max: Seconds = 0.0
    "How long it may take from the last offer of a prompt until it goes on with it. 0: it takes none."
    model: str = ""
    "Where its weights are, for itself: a router that has given it others can give it these again. Empty: not known."
    refused: bool = False
    "The router that it dials did not take it last time. It is not the one that says what fits, while others may come back."
    capabilities: tuple[str, ...] = ()
    "Optional features of its build (protocol/versions.py)."
    build: Build = Build()
    step_tokens: int = 0
    "Prompt tokens that it computes in one step, at most. 0: not known."


class RouterHello(Struct, frozen=True, array_like=True):
    router: NodeName
    beat_seconds: Seconds
    "Say something at least this often."
    lapse_seconds: Seconds
    "Nothing heard for so long: the other side is given up."
    capabilities: tuple[str, ...] = ()
    "As in InstanceHello."
    build: Build = Build()


class InstanceRefused(Struct, frozen=True, array_like=True):
    reason: str


class Heartbeat(Struct, frozen=True, array_like=True):
    """Of an instance. Its numbers (InstanceStats) come in messages of their own."""

    fault: str = ""
    "What is wrong with it, for people. Not empty: it gets no new requests."
    token_seconds: Seconds = 0.0
    "What a prompt token costs it, as measured. 0: not known."
    blocks_available: Natural = 0
    "Free, or cached and idle."
    slots_free: Natural = 0
    waiting_tokens: Counter = 0
    "Prompt tokens in line."
    decoding: Natural = 0
    stalled: bool = False
    "Its worker stands still, which is then its fault too: what it has does not go on, and nothing mends it soon."
    preempted: tuple[RequestId, ...] = ()
    "Requests of this router that were preempted there and do not run now; the longest waiting, where there are many."


class RouterHeartbeat(Struct, frozen=True, array_like=True):
    pass


class InstanceView(Struct, frozen=True):
    """One instance as its router sees it, for people (/v1/cluster, `baton up`)."""

    name: str
    role: Role
    state: str
    "alive, suspect (it gets no new requests), or lost."
    fault: str = ""
    health_url: str = ""
    pid: int = 0
    stats: InstanceStats = field(default_factory=InstanceStats)
    "As it told last."
    build: Build = Build()
    peers: tuple[str, ...] = ()
    "Where other instances read its KV pool, for each rank (InstanceHello.peers). Empty: nowhere."


class PathView(Struct, frozen=True):
    """Two instances between which KV blocks did not arrive, for people."""

    reader: str
    source: str
    failures: int
    "Hand-offs in a row of which next to nothing arrived."
    reason: str = ""
    "As the reader says it. Empty: it does not say."


class ClusterView(Struct, frozen=True):
    """The cluster as one router sees it. The router tells whoever started it, several times a second."""

    router: str
    mode: str
    queued: int = 0
    "Requests that no instance has yet."
    open: int = 0
    "Requests that are owed an end, the queued ones among them."
    instances: tuple[InstanceView, ...] = ()
    counters: dict[str, int] = {}
    "Since the router began: hand-offs, replays, losses, and so on."
    handoff_seconds: float = 0.0
    "Mean of the last hand-offs, from the last block computed to the request going on elsewhere."
    failed_paths: tuple[PathView, ...] = ()
    "Pairs of instances between which the last hand-off did not arrive, at most 100 of them."
