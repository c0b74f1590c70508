"""The checks beside the core: what plans may say, what clients may see, what must sometimes happen.

The core audits itself (core/engine/board.py); this file looks at it from outside, with knowledge of its own: the closed-form
output of every request, and a shadow of who owns which block. Numbers are those of docs/reliability.md.
"""

from __future__ import annotations

from baton.core.effects import Mode, Refuse
from baton.core.engine.instance import Instance
from baton.core.engine.request import ON_WORKER, Phase, Sequence
from baton.core.events import LossCause
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import NewSequence, StepPlan
from baton.sim.reference import Reference
from baton.sim.scenario import VOCAB, Client, Scenario
from baton.sim.tags import Oracle

PREEMPTIONS_MAX = 24
"""Invariant 33: preemptions of one sequence, none of them forced, without a token in between."""


class Trip:
    """One client's request, as the client sees it."""

    __slots__ = ("aborted", "client", "delivered", "ended", "ended_at", "hit", "oracles", "refused", "request", "sequences",
                 "submitted", "thrash")  # fmt: skip

    def __init__(self, client: Client) -> None:
        self.client = client
        self.request: GenerateRequest = client.request()
        self.oracles = [Oracle(self.request, index, VOCAB) for index in range(client.n)]
        self.delivered: list[list[int]] = [[] for _ in range(client.n)]
        self.ended: list[FinishReason | None] = [None] * client.n
        self.ended_at: float | None = None
        self.hit: list[int | None] = [None] * client.n
        "Prompt tokens that the first admission skipped."
        self.thrash = [0] * client.n
        self.sequences: list[Sequence] = []
        self.submitted = self.aborted = False
        self.refused: str | None = None


class Watch:
    def __init__(self, scenario: Scenario, instance: Instance) -> None:
        self.scenario = scenario
        self.instance = instance
        self.trips: dict[str, Trip] = {client.id: Trip(client) for client in scenario.clients}
        self.reference = Reference(scenario)
        self.sometimes: dict[str, int] = {}
        "Rare states that were reached."
        self.rows = 0
        self.deliveries = 0
        self.tokens = 0
        self._assigned = [0] * scenario.blocks
        self._owner: list[tuple[int, int]] = [(-1, 0)] * scenario.blocks
        self._tables: dict[int, list[BlockId]] = {}
        self._incarnation: dict[int, int] = {}
        self._position: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._clients: dict[tuple[int, int], tuple[Client, int]] = {}
        self._preempting: dict[Sequence, int] = {}
        self._deaths: dict[str, int] = {}
        self._losses: dict[tuple[str, int], int] = {}
        self._stopped: list[Trip] = []
        self._idle_steps = 0
        self._last_step = 0
        poison = sum(client.n for client in scenario.clients if client.poison_at is not None)
        self._culprits = max(1, poison + sum(fault.kind not in ("late", "repeat", "ghost") for fault in scenario.steps))
        "Causes of losses that look like the fault of a request: each can keep the others from being found once more."

    def saw(self, what: str) -> None:
        self.sometimes[what] = self.sometimes.get(what, 0) + 1

    # Plans

    def plan(self, plan: StepPlan) -> None:
        """4, 5, 19, 23, 30, 31, 32, 34: what the worker is told is allowed, and is what the front believes."""
        self._expect(plan.step == self._last_step + 1, 30, "steps are not numbered in order")
        self._last_step = plan.step
        scenario = self.scenario
        counts = plan.run.counts
        self.rows += len(plan.run.slots) + len(plan.drops)
        if len(counts) > scenario.slots or sum(counts) > scenario.tokens_per_step or (counts and min(counts) < 1):
            raise InvariantBroken(f"step {plan.step} runs {sum(counts)} tokens of {len(counts)} sequences", invariant=30)
        for slot, _ in plan.drops:
            self._tables.pop(slot, None)
        for new in plan.new:
            self._new(new)
        try:
            for slot, block in plan.grown:
                self._tables[slot].append(block)
                self._assign(block, slot)
            for slot, place, block in plan.folded:
                self._tables[slot][place] = block
            tables = [self._tables[slot] for slot in plan.run.slots]
        except KeyError as slot_error:
            raise InvariantBroken(f"step {plan.step} plans for slot {slot_error}, which is empty", invariant=25) from None
        if plan.drops and not counts:
            self.saw("a batch with nothing but drops")
        self._beside_decodes(plan)
        chunk_max = scenario.chunk_tokens_max or scenario.tokens_per_step
        for slot, count, table in zip(plan.run.slots, counts, tables, strict=True):
            self._writes(plan, slot, count, table, chunk_max)

    def _beside_decodes(self, plan: StepPlan) -> None:
        """30: where something decodes, prompts keep to their bound."""
        bound = self.scenario.prefill_tokens_beside_decodes
        if bound is None:
            return
        rows = zip(plan.run.slots, plan.run.counts, strict=True)
        chunks = [count for slot, count in rows if self._position[slot] < self._known[slot]]
        if len(chunks) == len(plan.run.slots):
            if sum(chunks) > bound:
                self.saw("more prompt tokens, as nothing decodes")
        elif sum(chunks) > bound:
            raise InvariantBroken(
                f"step {plan.step}: {sum(chunks)} prompt tokens beside decodes, {bound} allowed", invariant=30
            )
        elif sum(chunks) == bound:
            self.saw("prompts were held back beside decodes")

    def _new(self, new: NewSequence) -> None:
        sequence = self.instance.board.slots.occupants[new.slot]
        trip = self._trip_of(new)
        self._clients[new.slot, new.incarnation] = trip.client, new.index
        table, size = list(new.blocks), self.scenario.block_size
        self._tables[new.slot] = table
        self._incarnation[new.slot] = new.incarnation
        self._position[new.slot] = new.computed_tokens
        self._known[new.slot] = len(new.tokens)
        for block in table[new.computed_tokens // size :]:
            self._assign(block, new.slot)
        if list(new.tokens) != [*trip.client.prompt, *trip.delivered[new.index]]:
            raise InvariantBroken(f"{trip.client.id}.{new.index} prefills other tokens than its client has", invariant=32)
        if new.computed_tokens >= len(new.tokens) or new.computed_tokens % size or new.prompt_tokens != len(trip.client.prompt):
            raise InvariantBroken(f"{trip.client.id}: {new.computed_tokens} of {len(new.tokens)} tokens hit", invariant=19)
        if len(table) * size < len(new.tokens) or len(dict.fromkeys(table)) != len(table):
            raise InvariantBroken(f"{trip.client.id}: {len(table)} blocks for {len(new.tokens)} tokens", invariant=6)
        self._admitted(new, trip, sequence)

    def _admitted(self, new: NewSequence, trip: Trip, sequence: Sequence | None) -> None:
        if any(s.index == new.index and s.phase in ON_WORKER for s in trip.sequences):
            self._in_order(trip, new.index)  # else it was preempted again in a later plan of this event
        self.reference.admitted(trip.client, new.index)
        size = self.scenario.block_size
        if trip.hit[new.index] is None:
            trip.hit[new.index] = new.computed_tokens
            shares = self.scenario.prefix_caching or new.index
            self._expect(bool(shares) or not new.computed_tokens, 14, f"{trip.client.id} has a hit, and caching is off")
            if new.computed_tokens:
                self.saw("a prefix hit")
                if len(new.tokens) % size == 0 and new.computed_tokens == len(new.tokens) - size:
                    self.saw("a full hit: the last block is computed again")
                if new.index:
                    self.saw("a sibling found the leader's prompt")
        elif new.computed_tokens:
            self.saw("resumed from its own cached blocks")
        if new.incarnation > 1:
            self.saw("a slot was reused")

    def _in_order(self, trip: Trip, index: int) -> None:
        """34: nobody who is in line, or on the way back to it, comes before the one that is admitted."""
        order = self.reference.order(trip.client, index)
        for other in self.trips.values():
            for sequence in other.sequences:
                behind = sequence.phase in (Phase.WAITING, Phase.PREEMPTING)
                if behind and self.reference.order(other.client, sequence.index) < order:
                    raise InvariantBroken(f"{trip.client.id}.{index} overtook {sequence!r}", invariant=34)

    def _trip_of(self, new: NewSequence) -> Trip:
        sequence = self.instance.board.slots.occupants[new.slot]
        if sequence is None or sequence.incarnation != new.incarnation:
            raise InvariantBroken(f"slot {new.slot}.{new.incarnation} is planned for nobody", invariant=25)
        return self.trips[sequence.request.id]

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self._clients[slot, incarnation][0]

    def _assign(self, block: int, slot: int) -> None:
        self._assigned[block] += 1
        self._owner[block] = (slot, self._incarnation[slot])

    def _writes(self, plan: StepPlan, slot: int, count: int, table: list[BlockId], chunk_max: int) -> None:
        position, size, pool = self._position[slot], self.scenario.block_size, self.instance.board.cache.pool
        end = position + count
        self._position[slot] = end
        if end > len(table) * size:
            raise InvariantBroken(f"step {plan.step}: slot {slot} has no block for position {end - 1}", invariant=6)
        for block in table[position // size : (end - 1) // size + 1]:
            if self._owner[block] != (slot, self._incarnation[slot]):
                raise InvariantBroken(f"step {plan.step}: slot {slot} writes to block {block} of another", invariant=5)
            if pool.is_cached(block) or pool.request_references(block) > 1:
                raise InvariantBroken(f"step {plan.step}: slot {slot} writes to shared block {block}", invariant=4)
        if count > 1 or end < self._known[slot]:
            if count > chunk_max:
                raise InvariantBroken(f"step {plan.step}: a chunk of {count} tokens", invariant=30)
            if end == self._known[slot] and end % size == 0:
                self.saw("chunk, block and prompt end together")

    # Clients

    def submitted(self, trip: Trip) -> None:
        group = self.instance.board.groups.get(RequestId(trip.client.id))
        trip.sequences = list(group.sequences) if group is not None and group.request is trip.request else []

    def refused(self, effect: Refuse) -> None:
        """A refusal is the only answer."""
        trip = self.trips[effect.request]
        if any(trip.delivered) or any(trip.ended) or trip.refused:
            raise InvariantBroken(f"{effect.request} is refused after it was answered", invariant=22)
        if not str(effect.refused):
            raise InvariantBroken("a refusal says nothing", invariant=22)
        trip.refused = effect.refused.reason

    def emitted(self, emit: Emit, now: float) -> None:
        """21: tokens are a prefix of the undisturbed output. 22, 23, 26: one end, with the right reason and usage."""
        self.deliveries += len(emit.tokens) + len(emit.ended)
        for request, _, index, position, token in emit.tokens:
            trip = self.trips[request]
            delivered = trip.delivered[index]
            self._expect(position == len(delivered), 21, f"{request}.{index}: token {position} after {len(delivered)}")
            if trip.ended[index] is not None or trip.refused:
                raise InvariantBroken(f"{request}.{index} gets a token after its end", invariant=22)
            if trip.oracles[index].token(len(delivered)) != token:
                raise InvariantBroken(
                    f"{request}.{index}: token {len(delivered)} is {token}, not the undisturbed one", invariant=21
                )
            delivered.append(token)
            trip.thrash[index] = 0
            if token == 0:
                self.saw("token 0 was delivered")
            if len(delivered) == trip.client.stop_string_at and index == trip.client.n - 1:
                self._stopped.append(trip)
        if emit.tokens:
            self.tokens += len(emit.tokens)
            self._idle_steps = 0
        for ended in emit.ended:
            self._ended(ended, now)

    def _ended(self, ended: Ended, now: float) -> None:
        trip = self.trips[ended.request]
        index, client, delivered = ended.index, trip.client, trip.delivered[ended.index]
        if trip.ended[index] is not None or trip.refused:
            raise InvariantBroken(f"{ended.request}.{index} ends twice", invariant=22)
        trip.ended[index] = ended.reason
        trip.ended_at = now
        self.reference.ended(client, index)
        hit = trip.hit[index] or 0
        if (ended.prompt_tokens, ended.output_tokens, ended.cached_tokens) != (len(client.prompt), len(delivered), hit):
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        match ended.reason:
            case FinishReason.STOP if self._by_stop_string(trip, index):
                pass
            case FinishReason.STOP | FinishReason.LENGTH:
                if delivered != trip.oracles[index].complete() or ended.reason != trip.oracles[index].reason:
                    raise InvariantBroken(f"{ended.request}.{index} ends by {ended.reason} too early or wrongly", invariant=26)
                if (len(client.prompt) + len(delivered) - 1) % self.scenario.block_size == 0:
                    self.saw("an end on a block's edge")
                if any(s.index == index and s in self._preempting for s in trip.sequences):
                    self.saw("the last token was in flight at a preemption")
            case FinishReason.ABORT:
                if not trip.aborted and not self.reference.may_be_drained():
                    raise InvariantBroken(f"{ended.request}.{index} is aborted by nobody", invariant=22)
            case FinishReason.TIMEOUT:
                if not self.reference.may_time_out(client):
                    raise InvariantBroken(f"{ended.request}.{index} times out before its deadline", invariant=22)
                self.saw("a deadline passed in the line" if trip.hit[index] is None else "a deadline passed on the worker")
            case FinishReason.ERROR:
                self._failed(trip, index, ended)

    def _by_stop_string(self, trip: Trip, index: int) -> bool:
        """Ended by its front, at or (with tokens under way) after the place, and not by a stop id of its own."""
        wanted, oracle = trip.client.stop_string_at, trip.oracles[index]
        ours = wanted is not None and index == trip.client.n - 1 and len(trip.delivered[index]) >= wanted
        return ours and trip.delivered[index] != oracle.tokens[: len(oracle.complete())]

    def take_stopped(self) -> list[Trip]:
        """Sequences whose front has just seen a stop string."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _failed(self, trip: Trip, index: int, ended: Ended) -> None:
        """An error is allowed to those that cause one, and to all when the worker is given up."""
        outputs, client = len(trip.delivered[index]), trip.client
        if client.nan_at == outputs and ended.error == "row_failed":
            self.saw("one row failed, alone")
        elif client.poison_at == outputs and ended.error == "poison":
            self.saw("a poisonous request was given up")
        elif ended.error == "worker_gone" and self.reference.may_give_worker_up():
            self.saw("the worker was given up")
        elif ended.error != "poison" or self._losses.get((client.id, index), 0) < 2:
            raise InvariantBroken(f"{ended.request}.{index} fails for nothing: {ended.detail}", invariant=22)
        else:
            self.saw("a bystander was given up: the worker was lost twice at its place")

    def mode_changed(self, mode: Mode) -> None:
        """9: paused means that nobody is owed anything."""
        self.reference.mode_changed(mode.value)
        owed = [trip for trip in self.trips.values() if trip.submitted and trip.refused is None and None in trip.ended]
        if mode is Mode.PAUSED and owed:
            raise InvariantBroken(f"paused while {owed[0].client.id} is not answered", invariant=9)
        self.saw(f"mode: {mode}")

    def progressed(self, emit: Emit) -> None:
        """Whoever has a new token is past the place of an earlier loss."""
        for request, _, index, *_ in emit.tokens:
            self._losses.pop((request, index), None)

    def worker_lost(self, oldest: list[StepPlan], cause: LossCause) -> None:
        """Remember whose sequences were being computed: two such losses, with evidence, are what giving one up needs."""
        self.reference.worker_lost(evidence=cause != "killed")
        if cause == "killed":
            return
        for slot in dict.fromkeys(slot for plan in oldest for slot in plan.run.slots):
            client, index = self._clients[slot, self._incarnation[slot]]
            self._losses[client.id, index] = self._losses.get((client.id, index), 0) + 1

    def poisoned(self, client: Client | None) -> None:
        """47: one client's request takes at most log2(suspects) + 2 workers for each of its sequences with it."""
        if client is not None:
            self._deaths[client.id] = self._deaths.get(client.id, 0) + 1
            if self._deaths[client.id] > ((self.scenario.slots - 1).bit_length() + 2) * client.n * self._culprits:
                raise InvariantBroken(f"{client.id} has killed {self._deaths[client.id]} workers", invariant=47)

    # After every event

    def after(self) -> None:
        """22, 33, 35, for what this event touched."""
        self.reference.after_event(worker_gone=self.instance.worker.state.value == "gone")
        instance, board = self.instance, self.instance.board
        if not instance.in_flight and (board.running or len(board.waiting) or board.drops):
            self._expect(instance.worker.state.value != "ready" or instance.mode.value == "paused", 35, "work and no step")
        if board.preempting or self._preempting:
            self._preemptions()

    def step_absorbed(self) -> None:
        self._idle_steps += 1
        if self._idle_steps > 200 + 4 * self.scenario.blocks * self.scenario.block_size:
            raise InvariantBroken(f"{self._idle_steps} steps without a token for anyone", invariant=35)

    def forced(self) -> None:
        """A preemption from outside, or a lost worker, does not count as thrashing."""
        self._idle_steps = 0
        for trip in self.trips.values():
            trip.thrash = [0] * trip.client.n

    def _preemptions(self) -> None:
        board = self.instance.board
        for sequence in board.preempting:
            if self._preempting.get(sequence) == sequence.preemptions:
                continue
            self._preempting[sequence] = sequence.preemptions
            if sequence.in_flight:
                self.saw("preempted with tokens in flight")
            if sequence.computed or sequence.blocks or sequence.slot < 0:
                raise InvariantBroken(f"{sequence!r} is preempted and holds blocks, or lost its slot", invariant=31)
            if any(self._order(other) > self._order(sequence) for other in board.running):
                raise InvariantBroken(f"{sequence!r} is preempted and not the last in line", invariant=33)
            thrash = self.trips[sequence.request.id].thrash
            thrash[sequence.index] += 1
            if thrash[sequence.index] > PREEMPTIONS_MAX:
                raise InvariantBroken(f"{sequence!r}: preempted again and again, no token in between", invariant=33)
            if len(board.preempting) > 1 and not board.running:
                self.saw("everything was preempted")
            if sequence.preemptions > 1:
                self.saw("preempted more than once")
        for sequence in [s for s in self._preempting if s.phase is not Phase.PREEMPTING]:
            del self._preempting[sequence]

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return self.reference.order(self.trips[sequence.request.id].client, sequence.index)

    def generations(self) -> None:
        """5: a block's generation has grown once for each time it was handed out."""
        pool = self.instance.board.cache.pool
        if (generations := pool.generations()) == self._assigned:
            return
        for block, times in enumerate(self._assigned):
            if generations[block] != times:
                raise InvariantBroken(f"block {block}: handed out {times} times, generation {generations[block]}", invariant=5)

    # At rest

    def at_rest(self) -> None:
        """9, 22: nothing is held and everyone was answered; without faults, everything that fits succeeded."""
        instance = self.instance
        board = instance.board
        pool = board.cache.pool
        if instance.stats.folded_blocks:
            self.saw("two sequences filled the same block: folded")
        if board.cache.evicted:
            self.saw("a cached block was evicted")
        if instance.stats.stale_rows:
            self.saw("a late row of a former occupant")
        held = pool.total - pool.free - pool.idle
        left = (held, board.slots.taken, len(board.waiting), len(board.running), len(instance.in_flight))
        if any(left) or instance.board.groups or board.queued or board.drops or board.preempting:
            raise InvariantBroken(f"at rest: blocks, slots, waiting, running, plans = {left}", invariant=9)
        if instance.next_deadline() is not None:
            raise InvariantBroken("at rest and a deadline is armed", invariant=9)
        quiet = not self.scenario.faults
        for trip in self.trips.values():
            if trip.submitted and trip.refused is None and None in trip.ended:
                raise InvariantBroken(f"{trip.client.id} was never answered", invariant=22)
            if quiet and trip.client.timeout is None and trip.refused is None:
                self._expect(all(r in ("stop", "length") for r in trip.ended), 22, f"{trip.client.id} did not succeed")

    def _expect(self, ok: bool, invariant: int, message: str) -> None:
        if not ok:
            raise InvariantBroken(message, invariant=invariant)
