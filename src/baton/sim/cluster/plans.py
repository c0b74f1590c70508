"""What the plans of a node of a cluster may say, and what is remembered of them. Lighter than that of a single node (plans.py
there): no model of admission, because requests come and go between nodes. Numbers are those of docs/internals/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId
from baton.protocol.step import NewSequence, StepPlan
from baton.sim.cluster.watch import untagged
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.urgency_watch import UrgencyWatch


class NodePlans:
    """Also the onlooker of the node's worker process."""

    def __init__(
        self,
        scenario: Scenario,
        view: SchedulerView,
        client_requests: Mapping[str, SimulatedRequest],
        saw: Callable[[str], None],
    ) -> None:
        self.rows = 0
        self.saw = saw
        self.evidence = 0
        "Deaths of its worker that look like the fault of a request."
        self.weights: Callable[[], int] = lambda: 0
        "Of the worker that the plans are for."
        self._scenario = scenario
        self._size = scenario.block_size
        self._view = view
        self._trips = client_requests
        self._urgency = UrgencyWatch(view, scenario.steps_in_flight, saw)
        self._tables: dict[int, list[BlockId]] = {}
        self._position: dict[int, int] = {}
        self._clients: dict[tuple[int, int], Client] = {}
        self._last_use = [0] * scenario.blocks
        self._last_step = 0

    def check(self, plan: StepPlan) -> None:
        """4, 6, 19, 30, 32, 53, 59."""
        if plan.step != self._last_step + 1:
            raise InvariantBroken("steps are not numbered in order", invariant=30)
        self._last_step = plan.step
        counts = plan.run.counts
        self.rows += len(counts) + len(plan.drops)
        if len(counts) > self._scenario.slots or sum(counts) > self._scenario.tokens_per_step:
            raise InvariantBroken(f"step {plan.step} runs {sum(counts)} tokens of {len(counts)} sequences", invariant=30)
        for slot, _ in plan.drops:
            self._tables.pop(slot, None)
        for new in plan.new:
            self._new(new)
        try:
            for slot, block in plan.grown:
                self._tables[slot].append(block)
            for slot, place, block in plan.deduplicated:
                self._tables[slot][place] = block
            for slot, count in zip(plan.run.slots, counts, strict=True):
                self._writes(plan.step, slot, count, self._tables[slot])
        except KeyError as slot_error:
            raise InvariantBroken(f"step {plan.step} plans for slot {slot_error}, which is empty", invariant=25) from None
        self._urgency.planned(plan)

    def _new(self, new: NewSequence) -> None:
        sequence = self._view.slot_owner(new.slot, new.incarnation)
        if sequence is None:
            raise InvariantBroken(f"slot {new.slot}.{new.incarnation} is planned for nobody", invariant=25)
        client_request = self._trips[untagged(sequence.request.id)]
        self._clients[new.slot, new.incarnation] = client_request.client
        self._tables[new.slot] = list(new.blocks)
        self._position[new.slot] = new.computed_tokens
        prompt, weights = client_request.client.prompt, self.weights()
        outputs = list(new.tokens[len(prompt) :])
        begun = [known for known in client_request.weights_known if _begins(client_request, new.index, outputs, known)]
        if not begun or list(new.tokens[: len(prompt)]) != prompt:
            raise InvariantBroken(
                f"{client_request.name}.{new.index} prefills other tokens than the undisturbed ones", invariant=32
            )
        if weights not in begun or (sequence.request.outputs and client_request.weights != weights):
            raise InvariantBroken(
                f"{client_request.name}.{new.index} is to go on with weights {weights}, not its own", invariant=59
            )
        if new.computed_tokens >= len(new.tokens) or new.prompt_tokens != len(prompt):
            raise InvariantBroken(f"{client_request.name}: {new.computed_tokens} of {len(new.tokens)} tokens hit", invariant=19)
        if len(new.blocks) * self._size < len(new.tokens) or len(dict.fromkeys(new.blocks)) != len(new.blocks):
            raise InvariantBroken(f"{client_request.name}: {len(new.blocks)} blocks for {len(new.tokens)} tokens", invariant=6)

    def _writes(self, step: int, slot: int, count: int, table: list[BlockId]) -> None:
        begin = self._position[slot]
        end = self._position[slot] = begin + count
        if end > len(table) * self._size:
            raise InvariantBroken(f"step {step}: slot {slot} has no block for position {end - 1}", invariant=6)
        for block in table:
            self._last_use[block] = step
        for block in table[begin // self._size : (end - 1) // self._size + 1]:
            if self._view.is_shared(block):
                raise InvariantBroken(f"step {step}: slot {slot} writes to shared block {block}", invariant=4)

    def last_use(self, block: BlockId) -> int:
        return self._last_use[block]

    # The worker process

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self._clients[slot, incarnation]

    def worker_dies(self) -> None:
        self.evidence += 1

    def poisoned(self, client: Client | None) -> None:
        """That it is found out is asked of each node alone (invariant 47, watch.py there)."""


def _begins(client_request: SimulatedRequest, index: int, outputs: list[int], weights: int) -> bool:
    """With these weights its answer begins so."""
    oracle = client_request.oracles_of(weights)[index]
    if outputs:
        oracle.token(len(outputs) - 1)
    return oracle.tokens[: len(outputs)] == outputs
