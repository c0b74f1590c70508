"""Copies of blocks on device, host and storage under one key: what is copied, and when a copy may be trusted.

    device --store--> host --put--> storage          prepare: blocks are chosen and held, a BlockMove is sent
           <--load---      <-fetch-                   complete: its result arrives, the target can be found; or nothing happened

Blocks that a move holds while it is under way:

    store   the source is *not* held. It may be evicted and reassigned at any time; the copy counts only if the block's
            generation is the same when the result arrives, because the next owner writes to it in a later plan. So a
            slow service costs copies, never blocks.
    load    source and target are pinned; the target's last owner may still be writing, so the move is kept back until no plan
            that was out when the target was taken is in flight (the fence)
    pull    the target, as with a load. The source is another instance's pool; whether its blocks were unchanged all the
            time, that instance is asked afterwards (handoff/destination.py)
    put     the source is pinned: the written content must match its key
    fetch   the target belongs to the move

write_policy.py decides which blocks are copied down. Storage is queried by key and trusted for nothing: blocks that it does not
bring whole and verified are computed. A storage that wants token ids gets them too (token_links.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

from baton.config import TierConfig
from baton.core.deadlines import Deadlines
from baton.core.kv.host_tier import HostTier
from baton.core.kv.move import Move, Peer, Pending, Question, TierStats, message_of
from baton.core.kv.pool_trust import PoolTrust
from baton.core.kv.prefix_cache import PrefixCache
from baton.core.kv.rates import BlockRate
from baton.core.kv.storage_calls import StorageCalls
from baton.core.kv.token_links import NO_RUN, TokenChain, TokenLinks
from baton.core.kv.write_policy import WritePolicy
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, BlockKey, HostBlockId, Instant, MoveId, StepNo
from baton.protocol.moves import BlockMove, MoveKind, MoveResult, StorageAnswer, StorageQuery


class Tiers:
    def __init__(self, config: TierConfig, cache: PrefixCache, pool: PoolTrust, block_size: int) -> None:
        self.config = config
        self.enabled = config.host_blocks > 0 or config.peers
        self.host = HostTier(config.host_blocks)
        self.writes = WritePolicy(config, cache, self.host)
        self.stats = TierStats()
        self.rates: dict[MoveKind, BlockRate] = {
            "store": BlockRate(),
            "load": BlockRate(),
            "put": BlockRate(),
            "fetch": BlockRate(),
            "pull": BlockRate(),
        }
        self.outgoing: list[BlockMove | StorageQuery] = []
        "Messages for the cache service, in order."
        self.up = False
        "Whether the cache service is connected."
        self.answer_rate = BlockRate()
        "Measured seconds until storage answers a query."
        self.storage_calls = StorageCalls(config)
        self.read_circuit, self.write_circuit = self.storage_calls.read_circuit, self.storage_calls.write_circuit
        self.links: TokenLinks | None = None
        "Token ids of blocks. None: storage does not want them."
        self._block_size = block_size
        self._cache = cache
        self._pool = pool
        self._moves: dict[MoveId, Move] = {}
        self._fenced: list[Move] = []
        self._questions: dict[MoveId, Question] = {}
        self._numbers = count(1)
        self._storing = 0
        self._putting = 0
        self.loading_blocks = 0
        "Number of device blocks that loads fill."
        self._overdue: Deadlines[Move] = Deadlines()
        "Deadlines of moves. A move that misses its deadline will never end: the service hangs."

    # Copies down

    def flush(self, now: Instant) -> None:
        """Send all moves of one kind as one; called at the end of an event."""
        if self.up:
            if self.config.write == "back" and not self._storing:
                self.writes.clean_ahead(putting=self._putting > 0)
            if self.writes.to_store:
                self._store(now)
            if self.writes.to_put:
                self._put(now)

    def _store(self, now: Instant) -> None:
        """Send the blocks chosen in this event from the device to the host, as one move, as far as the host has room."""
        pool, to_store = self._cache.pool, self.writes.to_store
        if not self._pool.trusted:
            to_store.clear()
            return
        wanted = {key: entry for key, entry in to_store.items() if pool.generation(entry[0]) == entry[1]}
        self.stats.lost_stores += len(to_store) - len(wanted)  # reassigned in this very event
        to_store.clear()
        room = min(len(wanted), self.config.store_blocks_max - self._storing)
        host = self.host.take(room) if room > 0 else []
        self.stats.skipped_stores += len(wanted) - len(host)
        if not host:
            return
        keys = list(wanted)[: len(host)]
        move = Move(self._number(), "store", keys, host)
        move.device = [wanted[key][0] for key in keys]
        move.generations = [wanted[key][1] for key in keys]
        move.on_to_storage = [wanted[key][2] for key in keys]
        if self.links is not None:
            move.links = [self.links.on_device(block) for block in move.device]
        self._storing += len(host)
        self.writes.store_begun(move)
        self._send(move, now)

    def _put(self, now: Instant) -> None:
        """Put as many blocks as may be pinned; the rest waits for its turn, within the same bound."""
        size, to_put = self.config.put_blocks, self.writes.to_put
        bound = max(size, self.host.total // 4)
        while to_put and self._putting + size <= bound:
            chosen = list(islice(to_put, size))
            keys = [key for key in chosen if key in self.host and not self.host.is_stored(key)]
            for key in chosen:
                del to_put[key]
            if self.links is None:
                self._put_run(keys, NO_RUN, now)
                continue
            runs = self.links.runs(keys)
            self.stats.skipped_puts += len(keys) - sum(len(chain) for chain, _ in runs)
            for chain, run in runs:
                self._put_run(chain, run, now)
        while len(to_put) > bound:
            del to_put[next(iter(to_put))]
            self.stats.skipped_puts += 1

    def _put_run(self, keys: Sequence[BlockKey], run: TokenChain, now: Instant) -> None:
        permit = self.write_circuit.admit(now) if keys else None
        if permit is None:
            self.stats.skipped_puts += len(keys)
            return
        move = Move(self._number(), "put", keys, self.host.pin(keys))
        move.permit = permit
        self._putting += len(keys)
        self._send(move, now, run.tokens())

    # Copies up

    @property
    def questions(self) -> int:
        """Number of storage queries without an answer."""
        return len(self._questions)

    def query(self, keys: Sequence[BlockKey], run: TokenChain, now: Instant) -> Question | None:
        """Ask storage how many of these keys it has. None: not asked, because storage has failed too often."""
        permit = self.read_circuit.admit(now)
        if permit is None:
            return None
        question = Question(self._number(), keys, run, now)
        self._questions[question.id] = question
        self.storage_calls.begin(question, permit, now)
        self.outgoing.append(StorageQuery(question.id, question.keys, self.config.storage_seconds_max, run.tokens()))
        return question

    def fetch(self, keys: Sequence[BlockKey], run: TokenChain, now: Instant) -> Move | None:
        """Copy from storage to the host, as much as there is room for. None: there is no room."""
        host = self.host.take(min(len(keys), max(1, self.host.total // 2)))
        permit = self.read_circuit.admit(now) if host else None  # checked last: a probe that is not sent counts as failed
        if permit is None:
            for block in host:
                self.host.discard(block)
            return None
        move = Move(self._number(), "fetch", keys[: len(host)], host)
        move.permit = permit
        run = run.first(len(host))
        move.links = list(run.links)
        self._send(move, now, run.tokens())
        return move

    def load(self, keys: Sequence[BlockKey], targets: Sequence[BlockId], fence: StepNo) -> Move:
        """Copy from the host to these device blocks, which their owner holds and no other request knows."""
        move = Move(self._number(), "load", keys, self.host.pin(keys))
        self.host.touch(keys)
        self.loading_blocks += len(targets)
        return self._hold_back(move, targets, fence)

    def pull(self, peer: Peer, targets: Sequence[BlockId], fence: StepNo) -> Move:
        """Copy blocks of another instance to these device blocks, as with a load."""
        move = Move(self._number(), "pull", (), [])
        move.peer = peer
        return self._hold_back(move, targets, fence)

    def _hold_back(self, move: Move, targets: Sequence[BlockId], fence: StepNo) -> Move:
        move.device = list(targets)
        move.fence = fence
        self._cache.pin(move.device)
        self._moves[move.id] = move
        self._fenced.append(move)
        return move

    def open_fences(self, oldest_in_flight: StepNo | None, now: Instant) -> None:
        """Send the moves whose fence has passed: plans before `oldest_in_flight` have ended, and the worker that had them is
        alive."""
        if self._fenced:
            ready = [m for m in self._fenced if oldest_in_flight is None or m.fence is None or m.fence < oldest_in_flight]
            self._fenced = [move for move in self._fenced if move not in ready]
            for move in ready:
                self._send(move, now)

    # Results

    def complete(self, result: MoveResult, now: Instant) -> Move | None:
        """End a move by its result, exactly one per move. None: the move is unknown or has ended. `move.host` keeps the blocks
        that arrived."""
        move = self._moves.get(result.id)
        if move is None or move in self._fenced:
            return None
        del self._moves[result.id]
        self._overdue.discard(move)
        moved = max(0, min(result.moved, len(move.device if move.kind == "pull" else move.host)))
        self.rates[move.kind].moved(moved, result.seconds)
        if move.by_key:
            self.storage_calls.ended(move, result.error, now)
        move.fault = result.error or ""
        self._end(move, moved)
        return move

    def answered(self, answer: StorageAnswer, now: Instant) -> Question | None:
        """End a query by its answer. None: the query is unknown, or was given up."""
        question = self._questions.pop(answer.id, None)
        if question is not None:
            self.answer_rate.moved(1, now - question.asked_at)
            self.storage_calls.ended(question, answer.error, now)
        return question

    def late(self, now: Instant) -> list[Question]:
        """Give up the queries that storage did not answer in time. A late fetch keeps its host blocks until it ends."""
        late = [pending for pending in self.storage_calls.late(now) if isinstance(pending, Question)]
        for question in late:
            del self._questions[question.id]
            self.answer_rate.moved(1, now - question.asked_at)
            self.storage_calls.abandon(question)
        return late

    def _end(self, move: Move, moved: int) -> None:
        """Release the blocks of an ended move, of which `moved` leading ones arrived, and make the target findable."""
        if move.kind == "store":
            self._end_store(move, moved)
        elif move.kind in ("load", "pull"):
            self.host.unpin(move.host)
            self._cache.unpin(move.device)
            self.loading_blocks -= len(move.device) if move.kind == "load" else 0
            if move.void:
                self.stats.voided_loads += 1
                moved = 0
            self.stats.loaded += moved if move.kind == "load" else 0
            self.stats.pulled += moved if move.kind == "pull" else 0
        elif move.kind == "put":
            self.host.unpin(move.host)
            self._putting -= len(move.host)
            for block in move.host[:moved]:
                self.host.mark_stored(block)
            self.stats.put += moved
            self.stats.put_failures += len(move.host) - moved
        else:
            moved = 0 if move.void else moved
            self._insert(move, [place < moved for place in range(len(move.host))], stored=True)
            self.stats.fetched += moved
        move.whole = moved
        move.host = move.host[:moved]  # only the blocks that arrived remain

    def _end_store(self, move: Move, moved: int) -> None:
        pool = self._cache.pool
        self._storing -= len(move.host)
        self.writes.store_ended(move)
        whole = [
            place < moved and not move.void and pool.generation(block) == generation
            for place, (block, generation) in enumerate(zip(move.device, move.generations, strict=True))
        ]
        self._insert(move, whole, stored=False)
        self.stats.stored += sum(whole)
        self.stats.lost_stores += len(whole) - sum(whole)
        for key, arrived, put in zip(move.keys, whole, move.on_to_storage, strict=True):
            if arrived and put:
                self.writes.to_put[key] = None

    def _insert(self, move: Move, whole: list[bool], *, stored: bool) -> None:
        """Insert the deepest block first: the beginning of a chain is the last to be evicted."""
        for place in reversed(range(len(whole))):
            block = move.host[place]
            if whole[place]:
                marked = not stored and self._cache.is_marked(move.device[place])
                self.host.insert(move.keys[place], block, stored=stored, marked=marked)
                if self.links is not None:
                    self.links.inserted(block, move.links[place] if move.links else None)
            else:
                self.host.discard(block)

    # Losses

    def forget_host(self) -> None:
        """Forget the host tier. Copies on their way to the host are void, too."""
        self.host.forget()
        for move in self._moves.values():
            move.void = move.void or move.kind in ("store", "fetch")

    def next_deadline(self) -> Instant | None:
        if not self.up:
            return None
        overdue, late = self._overdue.earliest, self.storage_calls.next_late()
        return late if overdue is None else overdue if late is None else min(overdue, late)

    def hangs(self, now: Instant) -> str | None:
        """The reason to restart the service, which hangs: a move took far too long. None: it does not hang. Blocks that it may
        write to stay held until it is dead."""
        overdue = self._overdue.due(now) if self.up else []
        if not overdue:
            return None
        self.up = False
        for move in overdue:
            self.storage_calls.failed(move, now)
        if overdue[0].by_key:
            return f"a {overdue[0].kind} did not come back from storage"
        return "a copy in memory did not end in time"

    def service_ready(self, *, kept: bool, wants_tokens: bool = False) -> None:
        """Begin with a new service. `kept`: the host memory still has the contents that `host` lists."""
        self.up = True
        if wants_tokens != (self.links is not None):
            self.links = TokenLinks(self._cache, self.host, self._block_size) if wants_tokens else None
        if not kept:
            self.host.clear()

    def service_lost(self, now: Instant) -> list[Pending]:
        """End every move and query: the service process is dead. Completed copies stay valid."""
        self.up = False
        ended = [*self._moves.values(), *self._questions.values()]
        for move in self._moves.values():
            self._end(move, 0)
        self._moves.clear()
        self._overdue.clear()
        self._fenced.clear()
        self._questions.clear()
        self.storage_calls.clear(now)
        self.writes.clear()
        self.outgoing.clear()
        return ended

    def pool_changed(self) -> list[Move]:
        """The device's pool was replaced. Copies in progress may continue, into or out of the unused pool. Moves that their
        fence still kept back end, and are returned."""
        self.void_device_moves()
        never_sent, self._fenced = self._fenced, []
        for move in never_sent:
            del self._moves[move.id]
            self._end(move, 0)
        return never_sent

    def void_device_moves(self) -> None:
        """Void all copies out of or into the device's pool, which was replaced or is not trusted."""
        self.writes.to_store.clear()
        for move in self._moves.values():
            move.void = move.void or bool(move.device)

    # Helpers and proof

    def _number(self) -> MoveId:
        return MoveId(next(self._numbers))

    def _send(self, move: Move, now: Instant, tokens: bytes = b"") -> None:
        """Register the move with its deadline, and queue its message in `outgoing`."""
        self._moves[move.id] = move
        if move.permit is not None:
            overdue = self.storage_calls.begin(move, move.permit, now)
        else:
            pull = self.config.pull_seconds_max if move.peer is not None else 0.0
            overdue = Instant(now + pull + self.config.memory_seconds_max)
        self._overdue.set(move, overdue)
        self.outgoing.append(message_of(move, self._pool.incarnation, self.config, tokens))

    def pinned(self) -> dict[BlockId, int]:
        """Number of moves that hold each device block."""
        held: dict[BlockId, int] = {}
        for move in self._moves.values():
            if move.kind in ("load", "pull"):
                for block in move.device:
                    held[block] = held.get(block, 0) + 1
        return held

    def _host_blocks(self) -> tuple[dict[HostBlockId, int], dict[HostBlockId, int]]:
        """Host blocks that moves read, and host blocks that they write."""
        read: dict[HostBlockId, int] = {}
        written: dict[HostBlockId, int] = {}
        for move in self._moves.values():
            side = read if move.kind in ("load", "put") else written
            for block in move.host:
                side[block] = side.get(block, 0) + 1
        return read, written

    def check_part(self, begin: int, end: int) -> None:
        """Check host blocks `begin` to `end` only, and all moves."""
        self.host.check_part(begin, end, *self._host_blocks())
        self._check_moves()

    def check(self) -> None:
        self.host.check(*self._host_blocks())
        self._check_moves()

    def _check_moves(self) -> None:
        if any(move.id not in self._moves for move in self._fenced):
            raise InvariantBroken("a move waits for its fence and is not under way", invariant=17)
        if self._storing != sum(len(move.host) for move in self._moves.values() if move.kind == "store"):
            raise InvariantBroken("blocks being stored are counted wrong", invariant=17)
        if self.loading_blocks != sum(len(move.device) for move in self._moves.values() if move.kind == "load"):
            raise InvariantBroken("blocks being loaded are counted wrong", invariant=17)
        for move in self._moves.values():
            if self.up and move not in self._overdue and move not in self._fenced:
                raise InvariantBroken(f"{move.kind} {move.id} is under way without a deadline", invariant=17)

    def is_pending(self, pending: Pending) -> bool:
        """Whether the move or query is in progress, or kept back by its fence."""
        return self._moves.get(pending.id) is pending or self._questions.get(pending.id) is pending

    def pending(self) -> list[Pending]:
        return [*self._moves.values(), *self._questions.values()]
