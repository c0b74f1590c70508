"""Checks of each StepPlan, with a shadow of block owners and positions. Numbers are those of docs/internals/reliability.md.

`PlanWatch` holds for every instance. `ExactPlanWatch` is for one whose clients speak to it directly: what it admits, and when,
follows from what they do.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.msgpack import encode

from baton.core.engine.request import Sequence
from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, RequestId
from baton.protocol.step import NewSequence, StepPlan, StepResult
from baton.sim.admission_model import AdmissionModel
from baton.sim.chunk_watch import ChunkWatch
from baton.sim.line import Line, Place
from baton.sim.pace_watch import PaceWatch
from baton.sim.reference import Reference
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.urgency_watch import UrgencyWatch
from baton.sim.watch import Watch

MARK = "|"
"""Separates the tag of a session from the router's request id."""


def untagged(request: RequestId) -> RequestId:
    return RequestId(request.rpartition(MARK)[2])


class PlanWatch:
    """Checks of plans, which also observe the worker process of the instance (onlooker.py)."""

    def __init__(
        self,
        scenario: Scenario,
        view: SchedulerView,
        watch: Watch,
    ) -> None:
        self.rows = 0
        self.saw, self.happened = watch.saw, watch.happened
        self.weights: Callable[[], int] = lambda: 0
        "Weights of the worker that executes the plans."
        self._scenario = scenario
        self._size = scenario.block_size
        self._view = view
        self._requests = watch.requests
        self._pace = PaceWatch(scenario)
        self._chunks = ChunkWatch(scenario, view, watch.saw)
        self._urgency = UrgencyWatch(view, scenario.steps_in_flight, watch.saw)
        self._owner: list[tuple[int, int]] = [(-1, 0)] * scenario.blocks
        self._last_use = [0] * scenario.blocks
        self._tables: dict[int, list[BlockId]] = {}
        self._incarnation: dict[int, int] = {}
        self._position: dict[int, int] = {}
        self._known: dict[int, int] = {}
        "Positions that the plans have reached at most: a result with fewer tokens than drafts lowers it."
        self._drafted: dict[int, list[tuple[int, int, int]]] = {}
        "Per plan with drafts that is not absorbed: (slot, incarnation, tokens at most)."
        self._lengths: dict[int, tuple[int, ...]] = {}
        "Row lengths of the results of those plans."
        self._places: dict[tuple[int, int], Place] = {}
        "Sequences in the slots, by incarnation."
        self._last_step = 0
        self.deaths: dict[str, int] = {}
        "Workers that each client's request has killed."

    def check(self, plan: StepPlan) -> None:
        """4, 5, 6, 19, 25, 30, 32, 53, 59: the plan is allowed, and continues what clients have."""
        if plan.step != self._last_step + 1:
            raise InvariantBroken("steps are not numbered in order", invariant=30)
        self._last_step = plan.step
        self._lower(plan)
        counts, drafts = plan.run.counts, plan.run.drafts or (0,) * len(plan.run.counts)
        self.rows += len(counts) + len(plan.drops)
        if len(counts) > self._scenario.slots or plan.tokens > self._scenario.tokens_per_step:
            raise InvariantBroken(f"step {plan.step} runs {plan.tokens} tokens of {len(counts)} sequences", invariant=30)
        for slot, incarnation in plan.drops:
            self._drop(plan.step, slot, incarnation)
        for new in plan.new:
            self._new(new)
        try:
            for slot, block in plan.grown:
                self._tables[slot].append(block)
                self._assign(block, slot)
            for slot, place, block in plan.deduplicated:
                self._tables[slot][place] = block
            tables = [self._tables[slot] for slot in plan.run.slots]
        except KeyError as slot_error:
            raise InvariantBroken(f"step {plan.step} plans for slot {slot_error}, which is empty", invariant=25) from None
        if plan.drops and not counts:
            self.saw("a batch with nothing but drops")
        self._beside_decodes(plan)
        self._bytes(plan)
        self._pace.planned(plan, self._position, self._known)
        self._chunks.planned(plan, self._incarnation, self._position, self._known)
        for slot, count, more, table in zip(plan.run.slots, counts, drafts, tables, strict=True):
            self._writes(plan.step, slot, count, more, table)
        self._urgency.planned(plan)
        if plan.run.drafts:
            rows = zip(plan.run.slots, drafts, strict=True)
            self._drafted[plan.step] = [(slot, self._incarnation[slot], 1 + more) for slot, more in rows]

    def received(self, result: StepResult) -> None:
        """Record a result that the instance is about to get, and absorbs now or later."""
        if result.step in self._drafted:
            self._lengths[result.step] = result.lengths

    def _lower(self, plan: StepPlan) -> None:
        """Lower the positions. Steps before the oldest in flight are absorbed: their refused drafts do not count any more."""
        oldest = self._view.oldest_step or plan.step
        for step in [step for step in self._drafted if step < oldest]:
            rows, lengths = self._drafted.pop(step), self._lengths.pop(step, ())
            for (slot, incarnation, most), length in zip(rows, lengths, strict=False):
                if self._incarnation[slot] == incarnation:
                    self._position[slot] -= most - length

    def _drop(self, step: int, slot: int, incarnation: int) -> None:
        self._tables.pop(slot, None)
        if (slot, incarnation) not in self._places:
            raise InvariantBroken(f"slot {slot}.{incarnation} is dropped, and was never taken", invariant=25)

    def _beside_decodes(self, plan: StepPlan) -> None:
        """30: while sequences decode, prompts keep to their bound."""
        bound = self._scenario.prefill_tokens_beside_decodes
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

    def _bytes(self, plan: StepPlan) -> None:
        """30: new sequences and their settings are no larger than a plan may have, unless there is one alone."""
        bound = self._scenario.new_bytes_max
        if len(plan.new) > 1 and bound < 1 << 16 and len(encode((plan.new, plan.sampling))) > bound:
            raise InvariantBroken(f"step {plan.step}: {len(plan.new)} new sequences have more than {bound} bytes", invariant=30)

    # New sequences

    def _new(self, new: NewSequence) -> None:
        sequence = self._view.slot_owner(new.slot, new.incarnation)
        if sequence is None:
            raise InvariantBroken(f"slot {new.slot}.{new.incarnation} is planned without a sequence", invariant=25)
        request = self._requests[untagged(sequence.request.id)]
        self._places[new.slot, new.incarnation] = request, new.index
        table = self._tables[new.slot] = list(new.blocks)
        self._incarnation[new.slot] = new.incarnation
        self._position[new.slot] = new.computed_tokens
        self._known[new.slot] = len(new.tokens)
        for block in table[new.computed_tokens // self._size :]:
            self._assign(block, new.slot)
        self._continues(new, sequence, request)
        if new.computed_tokens >= len(new.tokens) or new.prompt_tokens != len(request.client.prompt):
            raise InvariantBroken(f"{request.name}: {new.computed_tokens} of {len(new.tokens)} tokens hit", invariant=19)
        if len(table) * self._size < len(new.tokens) or len(dict.fromkeys(table)) != len(table):
            raise InvariantBroken(f"{request.name}: {len(table)} blocks for {len(new.tokens)} tokens", invariant=6)

    def _continues(self, new: NewSequence, sequence: Sequence, request: SimulatedRequest) -> None:
        """32: the sequence begins as the undisturbed answer does. 59: with the weights that the answer was begun with."""
        prompt, weights = request.client.prompt, self.weights()
        outputs = list(new.tokens[len(prompt) :])
        begun = [known for known in request.weights_known if _begins(request, new.index, outputs, known)]
        if not begun or list(new.tokens[: len(prompt)]) != prompt:
            raise InvariantBroken(f"{request.name}.{new.index} prefills other tokens than the undisturbed ones", invariant=32)
        if weights not in begun or (sequence.request.outputs and request.weights != weights):
            raise InvariantBroken(f"{request.name}.{new.index} is to go on with weights {weights}, not its own", invariant=59)

    # Blocks

    def _assign(self, block: int, slot: int) -> None:
        self._owner[block] = (slot, self._incarnation[slot])

    def _writes(self, step: int, slot: int, count: int, drafts: int, table: list[BlockId]) -> None:
        position, size = self._position[slot], self._size
        end = self._position[slot] = position + count + drafts
        if drafts and (count > 1 or position < self._known[slot]):
            raise InvariantBroken(f"step {step}: slot {slot} has drafts, and computes its prompt", invariant=30)
        client = self._places[slot, self._incarnation[slot]][0].client
        if client.drafts_max is not None and drafts > client.drafts_max:
            raise InvariantBroken(f"step {step}: slot {slot} has {drafts} drafts, {client.drafts_max} allowed", invariant=30)
        if end > len(table) * size:
            raise InvariantBroken(f"step {step}: slot {slot} has no block for position {end - 1}", invariant=6)
        if end > len(client.prompt) + client.max_tokens - 1:
            raise InvariantBroken(f"step {step}: slot {slot} computes position {end - 1}, past its last token", invariant=30)
        for block in table:
            self._last_use[block] = step
        for block in table[position // size : (end - 1) // size + 1]:
            if self._owner[block] != (slot, self._incarnation[slot]):
                raise InvariantBroken(f"step {step}: slot {slot} writes to block {block} of another", invariant=5)
            if self._view.is_shared(block):
                raise InvariantBroken(f"step {step}: slot {slot} writes to shared block {block}", invariant=4)
        if count > 1 or end < self._known[slot]:
            if count > (self._scenario.chunk_tokens_max or self._scenario.tokens_per_step):
                raise InvariantBroken(f"step {step}: a chunk of {count} tokens", invariant=30)
            if end == self._known[slot] and end % size == 0:
                self.saw("chunk, block and prompt end together")

    def last_use(self, block: BlockId) -> int:
        """The last step that was planned to read or write the block."""
        return self._last_use[block]

    # The worker process

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self._places[slot, incarnation][0].client

    def worker_dies(self) -> None:
        """Nothing: losses are counted where the instance restarts the worker."""

    def poisoned(self, client: Client | None) -> None:
        """Count the workers that a request kills (47, cluster/isolation.py)."""
        if client is not None:
            self.deaths[client.id] = self.deaths.get(client.id, 0) + 1


class ExactPlanWatch(PlanWatch):
    def __init__(
        self,
        scenario: Scenario,
        view: SchedulerView,
        watch: Watch,
        reference: Reference,
        line: Line,
    ) -> None:
        super().__init__(scenario, view, watch)
        # With lower tiers blocks come and go that no plan names; thousands of slots are too many for a slow model.
        modelled = not scenario.host_blocks and scenario.slots <= 64
        self.model = AdmissionModel(scenario, view, line, watch.saw) if modelled else None
        self._reference = reference
        self._line = line
        self._assigned = [0] * scenario.blocks
        self._dropped: list[Place] = []
        "Sequences that the present plan drops and that have not ended."

    def check(self, plan: StepPlan) -> None:
        """Check a plan. 14, 34, 52 to 54: it admits the sequences that the models admit."""
        if plan.run.counts and min(plan.run.counts) < 1:
            raise InvariantBroken(f"step {plan.step} runs no token of a sequence", invariant=30)
        self._dropped = []
        if self.model is not None:
            self.model.before()
        super().check(plan)
        if self.model is not None:
            self.model.check(plan, self._dropped, {new.slot: self._places[new.slot, new.incarnation] for new in plan.new})

    def _drop(self, step: int, slot: int, incarnation: int) -> None:
        super()._drop(step, slot, incarnation)
        request, index = self._places[slot, incarnation]
        if request.ended[index] is None:
            self._dropped.append((request, index))
            self._line.is_dropped(request, index, step)

    def _new(self, new: NewSequence) -> None:
        super()._new(new)
        request, _ = self._places[new.slot, new.incarnation]
        if new.computed_tokens % self._size:
            raise InvariantBroken(f"{request.name}: {new.computed_tokens} tokens hit, a part of a block", invariant=19)
        self._line.admitted(request, new.index)
        self._reference.admitted(request.client, new.index)
        if request.hit[new.index] is None:
            request.hit[new.index] = new.computed_tokens
            if new.computed_tokens and not (self._scenario.prefix_caching or new.index):
                raise InvariantBroken(f"{request.name} has a hit, and caching is off", invariant=14)
            if new.computed_tokens:
                self.saw("a prefix hit")
                if len(new.tokens) % self._size == 0 and new.computed_tokens == len(new.tokens) - self._size:
                    self.saw("a full hit: the last block is computed again")
                if new.index:
                    self.saw("a sibling found the leader's prompt")
        elif new.computed_tokens:
            self.saw("resumed from its own cached blocks")
        if new.incarnation > 1:
            self.saw("a slot was reused")

    def _continues(self, new: NewSequence, sequence: Sequence, request: SimulatedRequest) -> None:
        if list(new.tokens) != [*request.client.prompt, *request.delivered[new.index]]:
            raise InvariantBroken(f"{request.name}.{new.index} prefills other tokens than its client has", invariant=32)

    def _assign(self, block: int, slot: int) -> None:
        self._assigned[block] += 1
        super()._assign(block, slot)

    def places_of(self, plan: StepPlan) -> list[Place]:
        """The sequences that the plan computes."""
        return [self._places[slot, self._incarnation[slot]] for slot in plan.run.slots]

    def generations(self) -> None:
        """5: a block's generation has grown once for each time that it was allocated."""
        if (generations := self._view.generations()) == self._assigned:
            return
        for block, times in enumerate(self._assigned):
            if self._scenario.host_blocks and generations[block] > times:
                continue  # the block was allocated for a load, which no plan names
            if generations[block] != times:
                raise InvariantBroken(f"block {block}: handed out {times} times, generation {generations[block]}", invariant=5)


def _begins(request: SimulatedRequest, index: int, outputs: list[int], weights: int) -> bool:
    """Whether the sequence's answer begins with `outputs` under these weights."""
    oracle = request.oracles_of(weights)[index]
    if outputs:
        oracle.token(len(outputs) - 1)
    return oracle.tokens[: len(outputs)] == outputs
