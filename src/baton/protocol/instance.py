"""Messages between instances and routers: how a session begins, and how each side knows that the other is alive. An instance
dials; the router answers.

    instance  InstanceHello ---> router    identity, weights, capacity
    router    RouterHello -> instance      accepted; or InstanceRefused, with the reason
    both      Heartbeat, RouterHeartbeat   several per second, also without other messages

A session is one connection. Its messages arrive in order and once, or the session ends (runtime/wire/link.py). Requests end
with their session: the instance aborts the router's requests, the router replays them elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from baton.protocol.control import InstanceReady, InstanceStats
from baton.protocol.ids import RequestId
from baton.protocol.numbers import Counter, Natural, NodeName, Seconds

Role = Literal["mixed", "prefill", "decode"]

PREEMPTED_NAMED_MAX: Final = 64
"""Number of preempted requests that a heartbeat names."""
HELD_CLASSES_MAX: Final = 8
"""Number of priorities of which a heartbeat has the held blocks."""
CACHED_KEYS_MAX: Final = 4096
"""Maximum of keys in one CachedKeys. A larger snapshot continues with the next heartbeats."""
CACHED_BYTES_MAX: Final = 6 * CACHED_KEYS_MAX


class Build(Struct, frozen=True):
    """The build of a process and its start time, for /v1/cluster and metrics."""

    version: str = ""
    commit: str = ""
    "Commit. Empty: unknown."
    started_at: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    "Start time in seconds since 1970, by the clock of its machine. 0: unknown."


class InstanceHello(Struct, frozen=True, array_like=True):
    name: NodeName
    "Name of the instance, unique in the cluster; for users and for stable placement."
    incarnation: int
    "Number drawn anew by every life of the engine."
    role: Role
    ready: InstanceReady
    layout: bytes
    "Fingerprint of a KV block's layout: a hand-off copies bytes."
    peers: tuple[str, ...] = ()
    """For each rank, where its messenger serves its pool: addresses separated by blanks, the best first. Empty: nowhere."""
    health_url: str = ""
    "URL of its own HTTP server, as reached from the router's machine. Empty: not reachable."
    pid: Natural = 0
    "Process id of its engine, for users on the same machine."
    adopt_seconds_max: Seconds = 0.0
    "Maximum of seconds from the last offer of a prompt until the request continues here. 0: it accepts none."
    model: str = ""
    "Path of its weights on its own machine: a router that has loaded others can order these again. Empty: unknown."
    refused: bool = False
    "Whether the dialled router refused it last time. Then it does not decide what fits, while others may come back."
    capabilities: tuple[str, ...] = ()
    "Optional features of its build (protocol/versions.py)."
    build: Build = Build()
    step_tokens: Natural = 0
    "Maximum of prompt tokens that it computes in one step. 0: unknown."


class RouterHello(Struct, frozen=True, array_like=True):
    router: NodeName
    beat_seconds: Seconds
    "Maximum of seconds between two messages."
    lapse_seconds: Seconds
    "Seconds without a message after which the other side is considered lost."
    capabilities: tuple[str, ...] = ()
    "Optional features of the router's build, as in InstanceHello."
    build: Build = Build()


class InstanceRefused(Struct, frozen=True, array_like=True):
    reason: str
    retry_seconds: Seconds = 0.0
    "After this time the cause may be over: the name is that of a session that may be dead. 0: not soon."


class Heartbeat(Struct, frozen=True, array_like=True):
    """Heartbeat of an instance. Its counters (InstanceStats) come in separate messages."""

    fault: str = ""
    "Fault of the instance, as text for users. Not empty: it gets no new requests."
    token_seconds: Seconds = 0.0
    "Measured seconds per prompt token. 0: unknown."
    blocks_available: Natural = 0
    "Number of free blocks, and of cached idle ones."
    slots_free: Natural = 0
    waiting_tokens: Counter = 0
    "Number of prompt tokens in the queue."
    decoding: Natural = 0
    stalled: bool = False
    "Whether the worker is stalled: requests make no progress, and a quick recovery is unlikely. `fault` is set, too."
    preempted: tuple[RequestId, ...] = ()
    "Requests of this router that were preempted there and do not run now; the longest waiting, if there are many."
    held: Annotated[tuple[tuple[int, Natural], ...], Meta(max_length=HELD_CLASSES_MAX)] = ()
    """Blocks held by priority, of all routers' requests: what a more urgent request may get by preemption. The least urgent
    first; if there are many priorities, the most urgent are left out."""


class CachedKeys(Struct, frozen=True, array_like=True):
    """Changes of an instance's cache since its last message, as short keys (core/kv/marks.py) of marked blocks on the device
    and in the host tier. Sent after heartbeats, to routers that list the capability `cached_keys`."""

    whole: bool = False
    "Whether all earlier keys are void: `added` begins the list anew."
    added: Annotated[bytes, Meta(max_length=CACHED_BYTES_MAX)] = b""
    removed: Annotated[bytes, Meta(max_length=CACHED_BYTES_MAX)] = b""


class RouterHeartbeat(Struct, frozen=True, array_like=True):
    pass


class InstanceView(Struct, frozen=True):
    """One instance as its router sees it, for users (/v1/cluster, `baton up`)."""

    name: str
    role: Role
    state: str
    "alive, suspect (it gets no new requests), or lost."
    fault: str = ""
    health_url: str = ""
    pid: int = 0
    stats: InstanceStats = field(default_factory=InstanceStats)
    "Stats as last reported."
    build: Build = Build()
    peers: tuple[str, ...] = ()
    "Addresses at which other instances read its KV pool, for each rank (InstanceHello.peers). Empty: it is not readable."
    kv_identity: str = ""
    "Label of its KV blocks in storage (baton kv list): the first digits of its identity."


class PathView(Struct, frozen=True):
    """Two instances between which KV blocks did not arrive, for users."""

    reader: str
    source: str
    failures: int
    "Number of hand-offs in a row of which almost nothing arrived."
    reason: str = ""
    "Reason of the last failure, as the reader reports. Empty: unknown."


class RefusedView(Struct, frozen=True):
    """An instance that the router does not accept, for users."""

    name: str
    "Name of the instance; its address, if the session ended before its hello."
    reason: str
    times: int
    "Number of refusals so far."
    seconds_ago: float
    "Seconds since the last refusal."


class RouterListening(Struct, frozen=True, array_like=True):
    """The router accepts instances and has its tokenizer: its start is complete. To its parent process, once."""


class ClusterView(Struct, frozen=True):
    """The cluster as one router sees it. The router sends it to its parent process, several times per second."""

    router: str
    mode: str
    queued: int = 0
    "Number of requests in the router's queue."
    open: int = 0
    "Number of requests that have not ended, including the queued ones."
    instances: tuple[InstanceView, ...] = ()
    counters: dict[str, int] = {}
    "Counters since the router's start: hand-offs, replays, losses, and so on."
    handoff_seconds: float = 0.0
    "Mean seconds of the last hand-offs, from the last computed block to the adoption."
    failed_paths: tuple[PathView, ...] = ()
    "Pairs of instances between which the last hand-off did not arrive, at most 100."
    prefix_keys: int = 0
    "Number of known keys of cached blocks, of all instances together."
    refused: tuple[RefusedView, ...] = ()
    "Instances that were refused in the last minutes and have not joined since."
