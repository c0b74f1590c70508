"""Which sequences must be admitted, which must give way, and the reserve: computed again for every plan.

Each step: the head of the queue preempts less urgent sequences, if that lets it in; running sequences continue and grow, at the
cost of the last one if no block is left; then, if none was preempted, sequences are admitted while the head fits: if there is a
prompt token left, a slot, and its blocks beside the reserve for the growth of running sequences that are as urgent.

How prompts share the tokens of a step is not modelled: urgency_watch.py checks the result instead. If running prompts that are
as urgent as the head could use all tokens, no sequence need be preempted for the head.

    7    an admission leaves the reserve alone               53   a head that fits is admitted
    52   a preemption for urgency lets the head in, with as few victims as possible; no other one without need. No sequence
         gives way for drafts, and no request waits for their blocks
    54   the reserve learns from ends, and from growth that had to preempt, and from nothing else

Only for instances without lower tiers, as cache_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId
from baton.protocol.step import StepPlan, StepResult
from baton.sim.cache_model import CacheModel, Held
from baton.sim.line import Line, Place
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import COMPLETE, SimulatedRequest

CLIP_TOKENS = 4096
"""Limit of the expected growth of one sequence; the default, which no scenario changes."""


class AdmissionModel:
    def __init__(self, scenario: Scenario, view: SchedulerView, line: Line, saw: Callable[[str], None]) -> None:
        self.cache = CacheModel(scenario, view)
        self._scenario = scenario
        self._view = view
        self._line = line
        self._saw = saw
        self._ratio = scenario.reserve_start
        self._growths = 0
        "Plans of this event in which growth may have preempted. The number of preemptions by each is not visible."
        self._taken: set[int] = set()
        "Slots that are not free."
        self._dropping: dict[int, int] = {}
        "Taken slots that are being dropped, and the step that drops them."
        self._plans: dict[int, list[tuple[int, int, int, int]]] = {}
        "Per plan without a result: (slot, incarnation, tokens that are computed then at most, drafts)."
        self._slot_of: dict[tuple[int, int], int] = {}
        "Slot of each sequence on the worker, by (arrival, index)."
        self._position: dict[int, int] = {}
        self._prefill: dict[int, int] = {}
        "Tokens to prefill, by slot."
        self._victims_due: list[Place] = []
        self._may_wait = self._prompts_ahead = False
        "Whether prompts as urgent as the head may use up the tokens of the step: its victims may stay then."
        self._unsure = False
        self.forced = False
        "Whether a sequence was preempted from outside, so that the next plan drops it."

    # Events

    def event(self) -> None:
        self.cache.tick += 1
        self.cache.fresh.clear()
        self._growths = 0

    def absorbed(self, step: int, result: StepResult) -> None:
        """A result was absorbed; delivered tokens are counted already, ends are not yet."""
        failed = {(failure.slot, failure.incarnation) for failure in result.failures}
        unsettled: list[tuple[int, int]] = []
        for (slot, incarnation, end, drafts), length in zip(self._plans.pop(step, ()), result.lengths, strict=False):
            held = self.cache.held.get(slot)
            if held is None or held.incarnation != incarnation or (failed and (slot, incarnation) in failed):
                continue
            if drafts:
                self._position[slot] -= 1 + drafts - length
            known = len(held.client_request.client.prompt) + len(held.client_request.delivered[held.index])
            computed = min(end, known - 1 if held.client_request.delivered[held.index] else known)
            if not self.cache.compute(slot, computed):
                unsettled.append((slot, computed))
        for slot, computed in unsettled:  # another sequence of this step was first
            self.cache.compute(slot, computed)
        if self._dropping:
            acknowledged = [slot for slot, dropped_by in self._dropping.items() if dropped_by <= step]
            for slot in acknowledged:
                del self._dropping[slot]
                self._taken.discard(slot)

    def ended(self, client_request: SimulatedRequest, index: int) -> None:
        if (
            client_request.hit[index] is not None and client_request.ended[index] in COMPLETE
        ):  # it was admitted once, and completed
            used = min(1.0, len(client_request.delivered[index]) / client_request.client.max_tokens)
            self._ratio += (used - self._ratio) * self._scenario.reserve_learning
        slot = self._slot_of.pop((client_request.orders[0][1], index), None)
        if slot is not None:
            self.cache.release(slot)

    def preempted_from_outside(self, client_request: SimulatedRequest, index: int) -> None:
        """The sequence has lost its blocks now; a later plan drops it."""
        self.forced = True
        if (slot := self._slot_of.pop((client_request.orders[0][1], index), None)) is not None:
            self.cache.release(slot)

    def worker_lost(self) -> None:
        self.cache.release_all()
        self._taken.clear()
        self._dropping.clear()
        self._plans.clear()
        self._slot_of.clear()
        self.forced = False

    def after_event(self) -> None:
        """54: growth's reserve goes half-way to 1 for each time that growth had to preempt; otherwise only ends count."""
        sent, ratio = self._view.reserve_ratio, self._ratio
        for _ in range(self._growths + 1):
            if abs(sent - ratio) < 1e-9:
                self._ratio = sent
                return
            ratio += (1.0 - ratio) / 2
        raise InvariantBroken(f"the reserve is {sent:.4f}, not {self._ratio:.4f}", invariant=54)

    # A plan

    def before(self) -> None:
        """The sequences that the next plan should preempt; `_line` does not know the plan yet."""
        self._unsure = self.forced or self._growths > 0  # unknown: the reserve for this plan
        self.forced = False
        self._may_wait = self._prompts_ahead = False
        self._victims_due = [] if self._unsure else self._victims()

    def check(self, plan: StepPlan, dropped: list[Place], places: Mapping[int, Place]) -> None:
        """Check a plan. `dropped`: the preempted sequences. `places`: new sequences, by slot. `_line` knows the plan now."""
        if dropped or self._victims_due:
            self._check_preempted(plan, dropped, len(self._growing()))
        self.cache.tick += 1
        self.cache.fresh.clear()
        for slot, _ in plan.drops:
            self._dropping[slot] = plan.step
        for client_request, index in dropped:
            if (gone := self._slot_of.pop((client_request.orders[0][1], index), None)) is not None:
                self.cache.release(gone)
        sure = not dropped and not self._unsure and bool(self._line.waiting)
        room = self._prompt_room(self._decoding())
        needed = self._growing()
        for slot, block in plan.grown:
            self.cache.grow(slot, block)
        self._check_early(plan, needed)
        for new in plan.new:
            self._admit(plan, places[new.slot], new.slot, new.incarnation, [*new.blocks], new.computed_tokens)
            self._prefill[new.slot], self._position[new.slot] = len(new.tokens), new.computed_tokens
        paced = self._scenario.decode_gap_seconds is not None and self._decoding() > 0  # learned: how much room there is
        room = self._run(plan, room)
        if room > 0 and not dropped and not paced:
            self._check_unused(plan)
        if room > 0 and sure and not paced:
            self._check_left_out(plan)

    def _run(self, plan: StepPlan, room: int) -> int:
        """Apply the run of a plan. Returns the prompt tokens that the step has left."""
        position = self._position
        rows: list[tuple[int, int, int, int]] = []
        most = plan.run.drafts or (0,) * len(plan.run.slots)
        for slot, count, drafts in zip(plan.run.slots, plan.run.counts, most, strict=True):
            held = self.cache.held.get(slot)
            if held is None:
                raise InvariantBroken(f"step {plan.step} runs slot {slot}, whose sequence has ended", invariant=25)
            if position[slot] < self._prefill[slot]:
                room -= count
            position[slot] += count + drafts
            rows.append((slot, held.incarnation, position[slot], drafts))
        self._plans[plan.step] = rows
        return room

    def _check_unused(self, plan: StepPlan) -> None:
        """53: a running prompt is computed as far as the step has room."""
        run: dict[int, int] = dict(zip(plan.run.slots, plan.run.counts, strict=True))
        chunk_max = self._scenario.chunk_tokens_max or self._scenario.tokens_per_step
        for slot in self.cache.held:
            if self._position[slot] < self._prefill[slot] and run.get(slot, 0) < chunk_max:
                raise InvariantBroken(f"step {plan.step} has room for more of the prompt in slot {slot}", invariant=53)

    def _check_left_out(self, plan: StepPlan) -> None:
        """53: a head that fits is in this plan."""
        if (head := self._line.head()) is None:
            return
        if plan.new and self._scenario.new_bytes_max < 1 << 16:
            return  # the head may be too large for the rest of the plan
        if len(self._taken) < self._scenario.slots and not self._line.returns_before(head[0].orders[head[1]]):
            need, left = self._need(head, self.cache.is_held), self.cache.available - self._reserve(head)
            if need <= left:
                raise InvariantBroken(f"step {plan.step}: {head[0].name}.{head[1]} fits, and waits", invariant=53)

    def _admit(self, plan: StepPlan, place: Place, slot: int, incarnation: int, blocks: list[BlockId], computed: int) -> None:
        client_request, index = place
        new = sum(not self.cache.is_held(block) for block in blocks)
        reserve = self._reserve(place)
        if new + reserve > self.cache.available:
            raise InvariantBroken(
                f"step {plan.step}: {client_request.name}.{index} takes {new} blocks of {self.cache.available}, "
                f"{reserve} are reserved",
                invariant=7,
            )
        self.cache.admit(slot, incarnation, place, blocks, computed // self._scenario.block_size)
        self._slot_of[client_request.orders[0][1], index] = slot
        self._taken.add(slot)

    # Preemption

    def _check_preempted(self, plan: StepPlan, dropped: list[Place], growing: int) -> None:
        victims = self._victims_due
        short = growing > self.cache.available + sum(self._freed(victims))
        if dropped and (growing > self.cache.available or self._unsure):
            self._growths += growing  # the instance may count the head's victims as those of growth
        if self._unsure:
            return
        missing = [place for place in victims if place not in dropped]
        if missing == victims and self._may_wait:
            victims = missing = []
        elif self._may_wait and self._prompts_ahead and self._are_of_growth(dropped, victims, growing):
            victims, missing, short = [], [], True
        if victims:
            self._saw("preempted for a more urgent one")
        if missing or (len(dropped) > len(victims) and not short):
            raise InvariantBroken(
                f"step {plan.step} preempts {_names(dropped)}; for the head of the line it should be {_names(victims)}",
                invariant=52,
            )

    def _check_early(self, plan: StepPlan, needed: list[int]) -> None:
        """52: a block is taken for drafts only while nothing waits, and beside one for each decoding sequence. `needed`: slots
        whose next token needs a block."""
        grown = [slot for slot, _ in plan.grown]
        if all(grown.count(slot) <= (slot in needed) for slot in grown):
            return
        self._saw("a block was taken for drafts")
        if self._line.head() is not None or self._line.dropped:
            raise InvariantBroken(f"step {plan.step} takes a block for drafts, and a request waits", invariant=52)
        if self.cache.available < self._decoding():
            raise InvariantBroken(f"step {plan.step} takes a block for drafts that a token may need", invariant=52)

    def _are_of_growth(self, dropped: list[Place], victims: list[Place], growing: int) -> bool:
        """Whether growth preempted these sequences: in the order of the head's victims, until it has room."""
        room = self.cache.available
        return all(place in victims for place in dropped) and room < growing <= room + sum(self._freed(dropped))

    def _victims(self) -> list[Place]:
        """The victims for the head: the fewest less urgent sequences, the least urgent first, that make room for it."""
        head = self._line.head() if self._line.waiting else None
        if head is None:
            return []
        urgency, order = head[0].orders[head[1]][0], head[0].orders[head[1]]
        running = sorted(self._line.on_worker)
        if not running or running[-1][0] <= urgency or self._line.returns_before(order):
            return []
        victims: list[Place] = []
        prompts, decoding = self._prompts_of(urgency), self._decoding()
        paced = self._scenario.decode_gap_seconds is not None and decoding > 0  # learned: how much room there is
        self._may_wait = prompts >= (1 if paced else self._prompt_room(decoding))
        self._prompts_ahead = prompts > 0
        while not self._would_fit(head, victims):
            last = running.pop() if running else None
            if last is None or last[0] <= urgency:
                return []
            victims.append(self._line.on_worker[last])
        return victims

    def _would_fit(self, head: Place, victims: list[Place]) -> bool:
        slots = [self._slot_of[client_request.orders[0][1], index] for client_request, index in victims]
        decoding = self._decoding() - sum(self._position[slot] >= self._prefill[slot] for slot in slots)
        free = self._scenario.slots - len(self._line.on_worker) + len(victims)
        if self._prompt_room(decoding) <= 0 or free <= 0:
            return False
        left: dict[BlockId, int] = {}
        for slot in slots:
            for block in self.cache.held[slot].blocks:
                left[block] = left.get(block, self.cache.references(block)) - 1
        freed = sum(not count for count in left.values())
        need = self._need(head, lambda block: left.get(block, self.cache.references(block)) > 0)
        return need + self._reserve(head) <= self.cache.available + freed

    def _freed(self, victims: list[Place]) -> list[bool]:
        blocks = [block for client_request, index in victims for block in self._held(client_request, index).blocks]
        return [self.cache.references(block) == blocks.count(block) for block in dict.fromkeys(blocks)]

    # Numbers

    def _need(self, place: Place, is_held: Callable[[BlockId], bool]) -> int:
        """Blocks that the sequence needs and does not hold yet."""
        client_request, index = place
        hits = self.cache.hits(client_request, index)
        known = len(client_request.client.prompt) + len(client_request.delivered[index])
        return -(-known // self._scenario.block_size) - sum(is_held(block) for block in hits)

    def _reserve(self, head: Place) -> int:
        """Blocks reserved for the growth of holders at least as urgent as the head."""
        urgency, size, total = head[0].orders[head[1]][0], self._scenario.block_size, 0
        for held in self.cache.held.values():
            if held.client_request.orders[held.index][0] <= urgency:
                client, capacity = held.client_request.client, len(held.blocks) * size
                expected = len(client.prompt) + int(self._ratio * client.max_tokens)
                expected = min(expected, held.last, capacity + CLIP_TOKENS)
                total += max(0, -(-(expected - capacity) // size))
        return total

    def _decoding(self) -> int:
        return sum(self._position[slot] >= self._prefill[slot] for slot in self.cache.held)

    def _prompt_room(self, decoding: int) -> int:
        """Prompt tokens that fit beside `decoding` decoding sequences."""
        left = self._scenario.tokens_per_step - decoding
        bound = self._scenario.prefill_tokens_beside_decodes
        return min(left, bound) if decoding and bound is not None else left

    def _prompts_of(self, urgency: int) -> int:
        """Prompt tokens not run yet of sequences on the worker that are at least this urgent."""
        urgent = (slot for slot, held in self.cache.held.items() if held.client_request.orders[held.index][0] <= urgency)
        return sum(max(0, self._prefill[slot] - self._position[slot]) for slot in urgent)

    def _growing(self) -> list[int]:
        """Slots of sequences whose next token needs one more block. Drafts in flight may be refused: they do not count."""
        size, growing, drafts = self._scenario.block_size, list[int](), dict[tuple[int, int], int]()
        for rows in self._plans.values():
            for slot, incarnation, _, count in rows:
                drafts[slot, incarnation] = drafts.get((slot, incarnation), 0) + count
        for slot, held in self.cache.held.items():
            position = self._position[slot] - drafts.get((slot, held.incarnation), 0)
            if self._prefill[slot] <= position < held.last and position == len(held.blocks) * size:
                growing.append(slot)
        return growing

    def _held(self, client_request: SimulatedRequest, index: int) -> Held:
        return self.cache.held[self._slot_of[client_request.orders[0][1], index]]


def _names(places: list[Place]) -> str:
    return ", ".join(f"{client_request.name}.{index}" for client_request, index in places) or "nobody"
