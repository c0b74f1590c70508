"""What a plan may say: the checks of each StepPlan, with a shadow of who owns which block and where each sequence stands.

Numbers are those of docs/internals/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.msgpack import encode

from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId
from baton.protocol.step import NewSequence, StepPlan
from baton.sim.admission_model import AdmissionModel
from baton.sim.line import Line, Place
from baton.sim.pace_watch import PaceWatch
from baton.sim.reference import Reference
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.urgency_watch import UrgencyWatch


class PlanWatch:
    def __init__(
        self,
        scenario: Scenario,
        view: SchedulerView,
        client_requests: Mapping[str, SimulatedRequest],
        reference: Reference,
        line: Line,
        saw: Callable[[str], None],
    ) -> None:
        self.rows = 0
        self._scenario = scenario
        self._view = view
        self._trips = client_requests
        self._reference = reference
        # With lower tiers blocks come and go that no plan tells of; thousands of slots are too many for a slow model.
        modelled = not scenario.host_blocks and scenario.slots <= 64
        self.model = AdmissionModel(scenario, view, line, saw) if modelled else None
        self._pace = PaceWatch(scenario)
        self._urgency = UrgencyWatch(view, scenario.steps_in_flight, saw)
        self._line = line
        self._saw = saw
        self._assigned = [0] * scenario.blocks
        self._owner: list[tuple[int, int]] = [(-1, 0)] * scenario.blocks
        self._last_use = [0] * scenario.blocks
        "The last step that was planned to read or write a block; kept where there are lower tiers."
        self._tables: dict[int, list[BlockId]] = {}
        self._incarnation: dict[int, int] = {}
        self._position: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._places: dict[tuple[int, int], Place] = {}
        "Who was in a slot, by its incarnation."
        self._last_step = 0

    def check(self, plan: StepPlan) -> None:
        """4, 5, 19, 23, 30, 31, 32, 34, 53: what the worker is told is allowed, and is what the front believes."""
        if plan.step != self._last_step + 1:
            raise InvariantBroken("steps are not numbered in order", invariant=30)
        self._last_step = plan.step
        scenario = self._scenario
        counts = plan.run.counts
        self.rows += len(plan.run.slots) + len(plan.drops)
        if len(counts) > scenario.slots or sum(counts) > scenario.tokens_per_step or (counts and min(counts) < 1):
            raise InvariantBroken(f"step {plan.step} runs {sum(counts)} tokens of {len(counts)} sequences", invariant=30)
        model = self.model
        if model is not None:
            model.before()
        dropped: list[Place] = []
        for slot, incarnation in plan.drops:
            self._tables.pop(slot, None)
            client_request, index = self._place(slot, incarnation)
            if client_request.ended[index] is None:
                dropped.append((client_request, index))
                self._line.is_dropped(client_request, index, plan.step)
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
            self._saw("a batch with nothing but drops")
        self._beside_decodes(plan)
        self._bytes(plan)
        self._pace.planned(plan, self._position, self._known)
        chunk_max = scenario.chunk_tokens_max or scenario.tokens_per_step
        for slot, count, table in zip(plan.run.slots, counts, tables, strict=True):
            self._writes(plan, slot, count, table, chunk_max)
        if model is not None:
            model.check(plan, dropped, {new.slot: self._places[new.slot, new.incarnation] for new in plan.new})
        self._urgency.planned(plan)

    def _beside_decodes(self, plan: StepPlan) -> None:
        """30: where something decodes, prompts keep to their bound."""
        bound = self._scenario.prefill_tokens_beside_decodes
        if bound is None:
            return
        rows = zip(plan.run.slots, plan.run.counts, strict=True)
        chunks = [count for slot, count in rows if self._position[slot] < self._known[slot]]
        if len(chunks) == len(plan.run.slots):
            if sum(chunks) > bound:
                self._saw("more prompt tokens, as nothing decodes")
        elif sum(chunks) > bound:
            raise InvariantBroken(
                f"step {plan.step}: {sum(chunks)} prompt tokens beside decodes, {bound} allowed", invariant=30
            )
        elif sum(chunks) == bound:
            self._saw("prompts were held back beside decodes")

    def _bytes(self, plan: StepPlan) -> None:
        """30: new sequences and their settings are no larger than a plan may have, unless there is one alone."""
        bound = self._scenario.new_bytes_max
        if len(plan.new) > 1 and bound < 1 << 16 and len(encode((plan.new, plan.sampling))) > bound:
            raise InvariantBroken(f"step {plan.step}: {len(plan.new)} new sequences have more than {bound} bytes", invariant=30)

    def _new(self, new: NewSequence) -> None:
        client_request = self._request_of(new)
        self._places[new.slot, new.incarnation] = client_request, new.index
        table, size = list(new.blocks), self._scenario.block_size
        self._tables[new.slot] = table
        self._incarnation[new.slot] = new.incarnation
        self._position[new.slot] = new.computed_tokens
        self._known[new.slot] = len(new.tokens)
        for block in table[new.computed_tokens // size :]:
            self._assign(block, new.slot)
        if list(new.tokens) != [*client_request.client.prompt, *client_request.delivered[new.index]]:
            raise InvariantBroken(
                f"{client_request.client.id}.{new.index} prefills other tokens than its client has", invariant=32
            )
        if (
            new.computed_tokens >= len(new.tokens)
            or new.computed_tokens % size
            or new.prompt_tokens != len(client_request.client.prompt)
        ):
            raise InvariantBroken(
                f"{client_request.client.id}: {new.computed_tokens} of {len(new.tokens)} tokens hit", invariant=19
            )
        if len(table) * size < len(new.tokens) or len(dict.fromkeys(table)) != len(table):
            raise InvariantBroken(f"{client_request.client.id}: {len(table)} blocks for {len(new.tokens)} tokens", invariant=6)
        self._admitted(new, client_request)

    def _admitted(self, new: NewSequence, client_request: SimulatedRequest) -> None:
        self._line.admitted(client_request, new.index)
        self._reference.admitted(client_request.client, new.index)
        size = self._scenario.block_size
        if client_request.hit[new.index] is None:
            client_request.hit[new.index] = new.computed_tokens
            shares = self._scenario.prefix_caching or new.index
            if new.computed_tokens and not shares:
                raise InvariantBroken(f"{client_request.client.id} has a hit, and caching is off", invariant=14)
            if new.computed_tokens:
                self._saw("a prefix hit")
                if len(new.tokens) % size == 0 and new.computed_tokens == len(new.tokens) - size:
                    self._saw("a full hit: the last block is computed again")
                if new.index:
                    self._saw("a sibling found the leader's prompt")
        elif new.computed_tokens:
            self._saw("resumed from its own cached blocks")
        if new.incarnation > 1:
            self._saw("a slot was reused")

    def _request_of(self, new: NewSequence) -> SimulatedRequest:
        sequence = self._view.slot_owner(new.slot, new.incarnation)
        if sequence is None:
            raise InvariantBroken(f"slot {new.slot}.{new.incarnation} is planned for nobody", invariant=25)
        return self._trips[sequence.request.id]

    def _place(self, slot: int, incarnation: int) -> Place:
        place = self._places.get((slot, incarnation))
        if place is None:
            raise InvariantBroken(f"slot {slot}.{incarnation} is dropped, and was never taken", invariant=25)
        return place

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self._places[slot, incarnation][0].client

    def places_of(self, plan: StepPlan) -> list[Place]:
        """Whom it computes."""
        return [self._places[slot, self._incarnation[slot]] for slot in plan.run.slots]

    def _assign(self, block: int, slot: int) -> None:
        self._assigned[block] += 1
        self._owner[block] = (slot, self._incarnation[slot])

    def _writes(self, plan: StepPlan, slot: int, count: int, table: list[BlockId], chunk_max: int) -> None:
        position, size = self._position[slot], self._scenario.block_size
        end = position + count
        self._position[slot] = end
        if end > len(table) * size:
            raise InvariantBroken(f"step {plan.step}: slot {slot} has no block for position {end - 1}", invariant=6)
        if self._scenario.host_blocks:
            for block in table:
                self._last_use[block] = plan.step
        for block in table[position // size : (end - 1) // size + 1]:
            if self._owner[block] != (slot, self._incarnation[slot]):
                raise InvariantBroken(f"step {plan.step}: slot {slot} writes to block {block} of another", invariant=5)
            if self._view.is_shared(block):
                raise InvariantBroken(f"step {plan.step}: slot {slot} writes to shared block {block}", invariant=4)
        if count > 1 or end < self._known[slot]:
            if count > chunk_max:
                raise InvariantBroken(f"step {plan.step}: a chunk of {count} tokens", invariant=30)
            if end == self._known[slot] and end % size == 0:
                self._saw("chunk, block and prompt end together")

    def last_use(self, block: BlockId) -> int:
        """The last step that was planned to read or write it."""
        return self._last_use[block]

    def generations(self) -> None:
        """5: a block's generation has grown once for each time it was handed out."""
        if (generations := self._view.generations()) == self._assigned:
            return
        for block, times in enumerate(self._assigned):
            if self._scenario.host_blocks and generations[block] > times:
                continue  # it was handed out to be loaded into, which no plan says
            if generations[block] != times:
                raise InvariantBroken(f"block {block}: handed out {times} times, generation {generations[block]}", invariant=5)
