"""The cache service and the storage behind it, modelled: blocks are copied byte by byte, in two halves, at times of their own.

The service has the memory of the real one: device pools by incarnation (a dead worker's pool stays mapped, without an owner),
and host blocks that outlive the service. Storage keeps objects with their key and checksum, as the real backends do, so that a
damaged object counts as missing. Completions come in any order. The service may die, hang, answer twice or be slow; storage
fails as the scenario's `cache_faults` demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol
from zlib import crc32

from baton.core.events import BlocksMoved, CacheLost, CacheReady, Event, StorageAnswered
from baton.core.kv.move import TierStats
from baton.errors import InvariantBroken
from baton.protocol.ids import PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult, StorageAnswer, StorageQuery
from baton.sim.cache_ranks import Answer, SimulatedCacheRanks
from baton.sim.noise import noise
from baton.sim.onlooker import Onlooker
from baton.sim.pull import SimulatedPull
from baton.sim.scenario import CacheFault, Scenario
from baton.sim.tags import TAG_BYTES
from baton.sim.tiers_watch import TierWatch
from baton.sim.timeline import Timeline

COPY_SECONDS = 0.0002
STORAGE_SECONDS = 0.002
RESTART_SECONDS = 0.3
KILL_SECONDS = 0.05
SLOW_COPY = 2.0
"Factor on a slow copy's `seconds` in memory: too small to make the service look hung."

Pool = list[bytearray]
SEEN = {
    "loaded": "blocks were loaded from the host",
    "fetched": "blocks were fetched from storage",
    "put": "blocks were put on storage",
    "lost_stores": "a block was handed on before its copy was whole",
    "voided_loads": "a load came for a pool that is gone",
}
"""Rare states by counter of TierStats."""


class SimulatedObject(NamedTuple):
    key: bytes
    checksum: int
    payload: bytes

    def is_whole(self, key: bytes, length: int) -> bool:
        return self.key == key and len(self.payload) == length and crc32(self.payload) == self.checksum


class SimulatedPeers(Protocol):
    """The cache services of other instances, by the address that their instances report."""

    remote: bool
    "Whether peers are on other machines, so that the memory of a dead one cannot be read."

    def find(self, address: str) -> CacheService | None: ...


class NoPeers:
    remote = False

    def find(self, address: str) -> CacheService | None:
        return None


NO_PEERS = NoPeers()


class CacheService:
    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        watch: TierWatch,
        onlooker: Onlooker,
        storage: dict[bytes, SimulatedObject] | None = None,
        peers: SimulatedPeers = NO_PEERS,
        label: str = "cache",
    ) -> None:
        """`storage`: shared with other instances. `peers`: services whose pools it may read. `label`: its name in a trace."""
        self._label = label
        self._scenario = scenario
        self._timeline = timeline
        self._watch = watch
        self._saw, self._happened = onlooker.saw, onlooker.happened
        self._block_bytes = TAG_BYTES * scenario.block_size
        self.host: Pool = [bytearray(self._block_bytes) for _ in range(scenario.host_blocks)]
        self.storage: dict[bytes, SimulatedObject] = {} if storage is None else storage
        self._taken_by_storage: dict[bytes, None] = {}
        "Keys of objects that were ever put or fetched."
        self._pools: dict[PoolIncarnation, Pool] = {}
        self._peers = peers
        self._mapped: dict[tuple[str, PoolIncarnation], Pool] = {}
        "Pools of peers: a mapping outlives the peer."
        self._gone = False
        "Whether the whole instance is dead."
        self._newest = PoolIncarnation(0)
        self._dispatch: Callable[[Event], None]
        self._ranks = SimulatedCacheRanks(scenario.ranks, scenario.seed, self.later) if scenario.ranks > 1 else None
        self._life = 0
        "Number of lives and deaths; odd while the service lives. Operations in flight end with their life."
        self._taken = 0
        self._faults = {fault.move: fault for fault in scenario.cache_faults}
        self._hung = False
        self._stuck: list[Callable[[], None]] = []
        "Copies of a hanging service: it may still make them until it is dead."
        self._memory_lost = False
        "Whether the host memory was lost and the instance does not know yet."
        self._announcement: CacheReady | None = None
        "Event of this life's start that the instance has not handled: its messages go to the closed socket of the one before."
        self._silent = False
        "Whether a put or fetch of this life never comes back from storage."
        self.is_being_killed = False
        self._healed = False

    def connect(self, instance: Callable[[Event], None]) -> None:
        self._dispatch = instance

    def begin(self) -> None:
        self._timeline.at(0.0, self._ready, True)
        if self._scenario.storage_warm:
            self._warm_up()

    def _warm_up(self) -> None:
        """Fill storage with the prompts' blocks, as an earlier engine would; some of them are damaged."""
        rot = self._scenario.storage_rot
        for client in self._scenario.clients:
            for key, payload in self._watch.contents.chain(client.salt, client.prompt).items():
                self.storage[key] = SimulatedObject(key, crc32(payload), payload)
        for number, (key, whole) in enumerate(self.storage.items()):
            if rot and number % rot == rot - 1:
                self.storage[key] = whole._replace(payload=bytes([whole.payload[0] ^ 1]) + whole.payload[1:])

    def heal(self) -> None:
        self._healed = True
        if self._hung:
            self.crash()

    def report_rare_states(self, stats: TierStats) -> None:
        """Report rare states to the campaign."""
        for name, what in SEEN.items():
            if getattr(stats, name):
                self._saw(what)

    def at_rest(self) -> None:
        if self._life % 2 == 0:
            raise InvariantBroken("the cache service was never started again", invariant=35)
        if self._ranks is not None:
            self._ranks.at_rest()

    def attach(self, incarnation: PoolIncarnation, pool: Pool) -> None:
        """Attach to a worker's pool: its descriptor has arrived."""
        self._newest = incarnation
        self._pools[incarnation] = pool

    def vanish(self) -> None:
        """Die with the whole instance: no event is sent, and operations in flight end."""
        self._life += self._life % 2
        self._gone = True
        self._stuck.clear()
        self._mapped.clear()

    def pool_for_peer(self, incarnation: PoolIncarnation) -> Pool | None:
        """The pool that a peer asks for, or None: another incarnation, or a service that does not answer."""
        answers = self.is_alive and not self._hung and incarnation == self._newest
        return self._pools[incarnation] if answers else None

    @property
    def is_alive(self) -> bool:
        return self._life % 2 == 1

    # Lives

    def _ready(self, kept: bool) -> None:
        if self._gone:
            return
        self._life += 1
        self._hung = self._silent = self.is_being_killed = False
        kept_by_all = kept if self._ranks is None else self._ranks.begin(len(self.host), self._life, kept=kept)
        self._announcement = CacheReady(kept_by_all, self._scenario.storage_tokens)
        if not kept:
            self._memory_lost = True
            for number, block in enumerate(self.host):
                block[:] = bytes([0x5A ^ number & 0xFF]) * len(block)
        self._timeline.note(self._label, f"ready, memory {'kept' if kept else 'lost'}")
        self._dispatch(self._announcement)

    def crash(self, *, kept: bool = True) -> None:
        """Die: operations in flight end. `kept`: the host memory survives."""
        if self._life % 2 == 0:
            return
        self._life += 1
        self._stuck.clear()
        self._mapped.clear()
        self._saw("the cache service died")
        self._timeline.note(self._label, "dies")
        self._timeline.at(self._timeline.now + RESTART_SECONDS, self._ready, kept)
        self._dispatch(CacheLost())

    def hang(self) -> None:
        if self._life % 2 and not self._healed:
            self._hung = True
            self._saw("the cache service hung")

    def restart(self, *, excused: bool) -> None:
        """Kill a service that the instance takes for hanging. `excused`: its clock was set ahead, so it had to."""
        if not self._hung and not self._silent and not excused:
            raise InvariantBroken("a cache service that works is restarted", invariant=46)
        self.is_being_killed = True
        self._timeline.at(self._timeline.now + KILL_SECONDS, self._killed, self._life)

    def _killed(self, life: int) -> None:
        """Make the stuck copies, then die: a hanging service may still write until it is dead."""
        if life == self._life:
            for copy in self._stuck:
                copy()
            self.crash()

    # The instance's knowledge

    def received(self, event: Event) -> None:
        """Update the model: the instance handles this event now."""
        match event:
            case CacheReady() if event is self._announcement:  # a frozen instance handles events of earlier lives first
                self._memory_lost, self._announcement = False, None
            case BlocksMoved(result):
                self._watch.answered(result.id, result.error)
            case StorageAnswered(answer):
                self._watch.answered(answer.id, answer.error)
            case CacheLost():
                self._watch.service_died()

    def full_check(self) -> None:
        if not self._memory_lost:
            self._watch.full_check(self.host, self._taken_by_storage)

    # Messages

    def take(self, message: BlockMove | StorageQuery) -> None:
        if self._life % 2 == 0 or self._hung or self._announcement is not None:
            return
        self._taken += 1
        fault = None if self._healed else self._faults.get(self._taken)
        if fault is not None:
            self._happened(f"copy {fault.kind}")
        what = message.kind if isinstance(message, BlockMove) else "ask"
        self._timeline.note(self._label, f"{what} {message.id}" + (f" ({fault.kind})" if fault is not None else ""))
        if message.tokens:
            self._saw("storage was sent token ids")
        if isinstance(message, StorageQuery):
            self._query(message, fault)
        else:
            self._move(message, fault)

    def _seconds(self, blocks: int, each: float, fault: CacheFault | None) -> float:
        extra = 0.0
        if fault is not None and fault.kind == "slow":
            extra = fault.seconds * (SLOW_COPY if each == COPY_SECONDS else 1.0)
        return each * (1 + blocks) * (0.5 + noise(self._scenario.seed, self._taken)) + extra

    def _query(self, query: StorageQuery, fault: CacheFault | None) -> None:
        if fault is not None and fault.kind == "silent":
            self._saw("storage never came back from a call")
            return
        seconds = self._seconds(len(query.keys) // 8, STORAGE_SECONDS, fault)
        failed = fault is not None and fault.kind == "error"
        found = 0
        while found < len(query.keys) and query.keys[found] in self.storage and not failed:
            found += 1
        if fault is not None and fault.kind == "short" and self._ranks is not None:
            found //= 2
        answer = StorageAnswer(query.id, found, "EIO" if failed else None)
        if seconds > query.seconds_max:
            seconds, answer = query.seconds_max, StorageAnswer(query.id, 0, "timeout")
        self.later(seconds, lambda: self._combine(answer, len(query.keys), lambda whole: self._dispatch(_event_of(whole))))

    def _combine(self, answer: Answer, blocks: int, then: Callable[[Answer], None]) -> None:
        """Send on the answer of all ranks. `answer` is that of one rank, or of the only one."""
        if self._ranks is None:
            then(answer)
        else:
            self._ranks.answer(answer, blocks, then)

    def _move(self, move: BlockMove, fault: CacheFault | None) -> None:
        if move.kind == "pull":
            seconds = self._seconds(len(move.device), COPY_SECONDS, fault)
            SimulatedPull(self, move, fault).begin(seconds)
            return
        slow = move.kind in ("put", "fetch")
        seconds = self._seconds(len(move.host), STORAGE_SECONDS if slow else COPY_SECONDS, fault)
        if slow and fault is not None and fault.kind == "silent":
            self._saw("storage never came back from a call")
            self._silent = True
            self._stuck.append(lambda: self._touch(move))
            return
        if slow:
            late = seconds > move.seconds_max
            seconds = min(seconds, move.seconds_max)
            self.later(seconds, lambda: self._storage_move(move, "timeout" if late else None, fault, seconds))
            return
        if fault is not None and fault.kind == "short" and self._ranks is not None:
            self.later(seconds, lambda: self._fall_short(move, seconds))
            return
        self.later(seconds * 0.3, lambda: self._copy_half(move, 0), copies=True)
        self.later(seconds * 0.9, lambda: self._copy_half(move, 1), copies=True)
        moved = len(move.host)
        if fault is not None and fault.kind == "error":
            moved //= 2  # the rest could not be copied, though it may have been written to
        self.later(seconds, lambda: self.done(move, MoveResult(move.id, moved, seconds), fault))

    def _fall_short(self, move: BlockMove, seconds: float) -> None:
        """Let one rank have moved only half of the blocks: the others' parts of the rest exist, but no whole blocks."""
        self._saw("a rank moved fewer blocks than another")
        for half in (0, 1):
            self._copy_half(move, half)
        moved, pool = len(move.host) // 2, self.target(move)
        for host, device in list(zip(move.host, move.device, strict=True))[moved:]:
            block = self.host[host] if move.kind == "store" else pool[device]
            block[: self._block_bytes // 2] = bytes(self._block_bytes // 2)
        self.done(move, MoveResult(move.id, moved, seconds), None)

    def target(self, move: BlockMove) -> Pool:
        """The device pool of a move: the present one, or that of a dead worker. 17: the service has been given it."""
        pool = self._pools.get(move.pool)
        if pool is None:
            raise InvariantBroken(f"a move is about pool {move.pool}, which it was never given", invariant=17)
        if move.pool == self._newest:
            self._watch.copies(move)
        return pool

    def map_peer(self, peer: str, incarnation: PoolIncarnation) -> Pool | None:
        """The peer's memory as it is now. Mapped once, it can be read when the peer is dead; over a network it cannot."""
        service = self._peers.find(peer)
        if service is not None and (found := service.pool_for_peer(incarnation)) is not None:
            self._mapped[peer, incarnation] = found
        if self._peers.remote and (service is None or not service.is_alive):
            return None
        return self._mapped.get((peer, incarnation))

    def saw(self, what: str) -> None:
        self._saw(what)

    def _copy_half(self, move: BlockMove, half: int) -> None:
        pool = self.target(move)
        middle = self._block_bytes // 2
        part = slice(0, middle) if half == 0 else slice(middle, None)
        for host, device in zip(move.host, move.device, strict=True):
            if move.kind == "store":
                self.host[host][part] = pool[device][part]
            else:
                pool[device][part] = self.host[host][part]

    def _touch(self, move: BlockMove) -> None:
        """Finish a stuck call just before its process dies: it still reads or writes its host blocks."""
        for key, host in zip(move.keys, move.host, strict=True):
            if move.kind == "put":
                self._watch.put(key, bytes(self.host[host]))
            else:
                self.host[host][:] = bytes(self._block_bytes)

    def _storage_move(self, move: BlockMove, error: str | None, fault: CacheFault | None, seconds: float) -> None:
        moved = 0
        if error is None and fault is not None and fault.kind == "error":
            error = "EIO"
        full = fault is not None and fault.kind == "full" and move.kind == "put"
        while moved < len(move.host) and error is None:
            key, host = move.keys[moved], move.host[moved]
            if full and key not in self.storage and fault is not None and moved >= int(fault.seconds * 10) % 3:
                self._saw("storage was full")
                error = "full"
                break
            if move.kind == "put":
                self._put(key, bytes(self.host[host]), fault, moved)
            elif not self._fetch(key, host):
                break
            self._taken_by_storage[key] = None
            moved += 1
        self.done(move, MoveResult(move.id, moved, seconds, error), fault)

    def _put(self, key: bytes, payload: bytes, fault: CacheFault | None, place: int) -> None:
        self._watch.put(key, payload)
        kind = fault.kind if fault is not None and place == int(fault.seconds * 10) % 3 else ""
        whole = SimulatedObject(key, crc32(payload), payload)
        match kind:
            case "flip":
                whole = whole._replace(payload=bytes([payload[0] ^ 1]) + payload[1:])
            case "torn":
                whole = whole._replace(payload=payload[: len(payload) // 2])
            case "misdirect" if self.storage:
                key = next(iter(self.storage))
            case "foreign":
                whole = SimulatedObject(bytes(32), crc32(b"x" * len(payload)), b"x" * len(payload))
            case "vanish":
                self._saw("an object vanished from storage")
                return
        if kind in ("flip", "torn", "misdirect", "foreign"):
            self._saw("an object on storage was damaged")
        self.storage[key] = whole

    def _fetch(self, key: bytes, host: int) -> bool:
        found = self.storage.get(key)
        if found is None:
            return False
        self.host[host][: len(found.payload)] = found.payload[: self._block_bytes]  # as a real read would find
        if not found.is_whole(key, self._block_bytes):
            self._saw("a damaged object was found out")
            del self.storage[key]  # no lookup finds the block again
            return False
        return True

    def done(self, move: BlockMove, result: MoveResult, fault: CacheFault | None) -> None:
        blocks = len(move.host or move.device)
        self._combine(result, blocks, lambda whole: self._report(move, whole, blocks, fault))

    def _report(self, move: BlockMove, answer: Answer, blocks: int, fault: CacheFault | None) -> None:
        assert isinstance(answer, MoveResult)
        self._timeline.record(answer)
        self._timeline.note(self._label, f"{answer.id}: {answer.moved} moved")
        self._dispatch(BlocksMoved(answer))
        if not self._memory_lost:
            self._watch.entries(move.host, self.host)
        self._watch.arrived(move)
        if fault is not None and fault.kind == "repeat":
            self.later(fault.seconds, lambda: self._combine(answer, blocks, lambda again: self._dispatch(_event_of(again))))

    def later(self, seconds: float, action: Callable[[], None], *, copies: bool = False) -> None:
        self._timeline.at(self._timeline.now + seconds, self._act, (self._life, action, copies))

    def _act(self, entry: tuple[int, Callable[[], None], bool]) -> None:
        life, action, copies = entry
        if life != self._life:
            return
        if not self._hung:
            action()
        elif copies:
            self._stuck.append(action)


def _event_of(answer: Answer) -> Event:
    return BlocksMoved(answer) if isinstance(answer, MoveResult) else StorageAnswered(answer)
