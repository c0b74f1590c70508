"""A draft model drafts where it pays, and costs little where it does not: told seconds, and no clock."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from baton.worker.drafters.model_price import ALLOWANCE, FIRST_STEPS, ModelPrice, PassSeconds
from baton.worker.drafters.price import DraftPrice
from baton.worker.drafters.priced_model import PricedModel


class Machine:
    """Main and draft model by their times, drafts that are right by chance, and a clock that only they advance."""

    def __init__(
        self, *, share: float, draft_cost: float, prompt: int = 40, row: float = 0.05, context: int = 4000, sequences: int = 1
    ) -> None:
        self.rng, self.share, self.draft_cost, self.row, self.context = random.Random(1), share, draft_cost, row, context
        self.slots = range(sequences)
        self.lengths = np.full(sequences, prompt, np.int64)
        self.tokens = np.zeros((sequences, 10_000), np.int32)
        self.have = [0] * sequences
        self.clock = 0.0
        self.passed = lambda rows, seconds: None
        self.delays: list[float] = []
        price = DraftPrice(row)
        self.price, self.model = price, PricedModel(self, price)  # type: ignore[arg-type]
        for slot in self.slots:
            price.assign_slot(slot)
            self.model.assign_slot(slot)

    def assign_slot(self, slot: int) -> None:
        self.have[slot] = 0

    def rooms(self, most: Mapping[int, int], batch: object) -> dict[int, int]:
        return {slot: room for slot, room in most.items() if self.lengths[slot] < self.context}

    def behind(self, slot: int, batch: object) -> int:
        return int(self.lengths[slot] - min(self.have[slot], self.lengths[slot] - 1))

    def propose_all(self, wanted: Mapping[int, int], batch: object, rows: int = 256) -> dict[int, list[int]]:
        found, left = dict[int, list[int]](), rows
        for behind, slot in sorted((self.behind(slot, batch), slot) for slot in wanted):
            count = min(behind, left)
            left -= count
            self.have[slot] = int(self.lengths[slot]) - behind + count
            if count == behind:
                found[slot] = [int(self.rng.random() >= self.share) for _ in range(wanted[slot])]  # 0 is right
        self._pass(rows - left)
        for done in range(1, max((wanted[slot] for slot in found), default=0)):
            self._pass(sum(wanted[slot] > done for slot in found))
        return found

    def _pass(self, rows: int) -> None:
        seconds = self.draft_cost * (1 + 0.02 * (rows - 1))
        self.clock += seconds
        self.passed(rows, seconds)

    def step(self) -> int:
        """The number of tokens."""
        before, count = self.clock, len(self.slots)
        drafts = self.model.drafts(count, count, dict.fromkeys(self.slots, 4), self)  # type: ignore[arg-type]
        rows = count + sum(map(len, drafts.values()))
        seconds = 1.0 + self.row * (rows - 1)
        self.clock += seconds
        self.price.measured(rows, seconds)
        self.model.stepped(seconds)
        right = {
            slot: next((place for place, token in enumerate(draft) if token), len(draft)) for slot, draft in drafts.items()
        }
        if drafts:
            self.model.verified(count, {slot: len(draft) for slot, draft in drafts.items()}, right)
        for slot, draft in drafts.items():
            self.have[slot] += min(right[slot], len(draft) - 1)
        for slot in self.slots:
            self.lengths[slot] += right.get(slot, 0) + 1
        self.delays.append(self.clock - before)
        return sum(right.values()) + count

    def tokens_per_second(self, tokens: int) -> float:
        begun, made = self.clock, 0
        while made < tokens:
            made += self.step()
        return made / (self.clock - begun)

    def ratio(self, tokens: int) -> float:
        """Tokens per second, as a multiple of those without drafts."""
        count = len(self.slots)
        return self.tokens_per_second(tokens) * (1.0 + self.row * (count - 1)) / count


def test_a_cheap_model_that_is_right_doubles_the_speed():
    machine = Machine(share=0.9, draft_cost=0.1)
    machine.tokens_per_second(100)
    assert machine.tokens_per_second(1000) > 2.0


@pytest.mark.parametrize(("share", "cost", "row"), [(0.1, 0.1, 0.05), (0.9, 1.0, 0.5), (0.0, 0.5, 0.1), (0.5, 0.5, 0.2)])
def test_a_model_that_does_not_pay_costs_three_percent_at_most(share, cost, row):
    machine = Machine(share=share, draft_cost=cost, row=row)
    begin = machine.tokens_per_second(300)
    assert machine.tokens_per_second(3000) > 0.97
    assert begin > 300 / (300 + 3 * FIRST_STEPS), "what the start may cost is bounded too"


@pytest.mark.parametrize("sequences", [4, 16])
def test_drafts_that_pay_only_for_all_sequences_together_run(sequences):
    """A round costs the same for one sequence as for all: as on a GPU, where both models read all weights in each pass."""
    machine = Machine(share=0.9, draft_cost=0.25, row=0.01, prompt=256, sequences=sequences)
    machine.tokens_per_second(100 * sequences)
    assert machine.ratio(200 * sequences) > 1.4


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("sequences", [4, 16])
def test_looking_at_all_sequences_costs_three_percent_at_most(share, sequences):
    machine = Machine(share=share, draft_cost=0.25, row=0.01, prompt=256, sequences=sequences)
    begin = machine.ratio(300 * sequences)
    assert machine.ratio(3000 * sequences) > 0.97
    assert begin > 300 / (300 + 3 * FIRST_STEPS)


def test_a_long_prompt_is_computed_in_parts_no_longer_than_a_step():
    machine = Machine(share=0.9, draft_cost=0.1, prompt=2000)
    machine.tokens_per_second(400)
    assert machine.have[0] > 2000
    assert max(machine.delays) < 2.5
    assert machine.tokens_per_second(400) > 2.0


def test_short_answers_to_long_prompts_are_not_paid_with_more_than_there_is():
    """Each answer is over before its prompt would be worth its time."""
    machine, made = Machine(share=0.9, draft_cost=0.2, prompt=3000), 0
    for _ in range(400):
        machine.lengths[0] = 3000
        machine.model.assign_slot(0)
        made += sum(machine.step() for _ in range(10))
    assert machine.clock < made + FIRST_STEPS + 1.0 + 2 * ALLOWANCE * made


def test_text_that_becomes_predictable_is_noticed():
    machine = Machine(share=0.0, draft_cost=0.1)
    assert 0.95 < machine.tokens_per_second(500) < 1.0
    machine.share = 0.9
    machine.tokens_per_second(500)
    assert machine.tokens_per_second(500) > 2.0


def test_a_new_prompt_costs_little_where_drafts_did_not_pay():
    machine = Machine(share=0.0, draft_cost=0.3)
    machine.tokens_per_second(500)
    for _ in range(3):
        machine.lengths[0] += 1000
        machine.model.assign_slot(0)
        begun = machine.clock
        assert sum(machine.step() for _ in range(100)) > 0.92 * (machine.clock - begun)


def test_beyond_the_context_nothing_is_asked():
    machine = Machine(share=0.9, draft_cost=0.1, context=300)
    machine.tokens_per_second(400)
    machine.passed = None  # type: ignore[assignment]
    assert machine.tokens_per_second(300) == pytest.approx(1.0)


def test_several_sequences_share_a_round():
    """Four rows of the draft model cost little more than one, so drafts that pay for one pay for all."""
    price = ModelPrice(lambda rows: 1.0 + 0.1 * (rows - 1))
    for rows, seconds in ((1, 0.2), (4, 0.22), (8, 0.25)):
        price.passes.measured(rows, seconds)
    for slot in range(4):
        price.assign_slot(slot)
        for _ in range(20):
            price.accepted(slot, 4, 4 if slot else 0)
    chosen = price.choose(4, 4, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 4))
    assert chosen.keys() == {1, 2, 3}
    assert set(chosen.values()) == {4}


def test_waiting_for_tokens_is_part_of_the_price():
    """On a GPU a step with drafts is not launched before the last tokens are known."""
    price = ModelPrice(lambda rows: 1.0)
    price.passes.measured(1, 0.1)
    price.assign_slot(0)
    for waiting, pays in ((0.0, True), (0.3, True), (0.9, False)):
        price.waiting = waiting
        assert bool(price.choose(1, 1, {0: 1}, {0: 4})) == pays


def test_no_more_drafts_than_the_step_has_room_for():
    """Of the likeliest."""
    price = ModelPrice(lambda rows: 1.0)
    price.passes.measured(1, 0.001)
    for slot in range(4):
        price.assign_slot(slot)
        price.accepted(slot, 1, int(slot == 2))
    assert sum(price.choose(4, 4, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 4), 5).values()) == 5
    assert price.choose(4, 4, dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 4), 1) == {2: 1}


def test_the_account_pays_for_a_wait_once():
    """Looking whether drafts would be right costs the wait, too, where nothing else in the step waits."""
    machine = Machine(share=0.9, draft_cost=0.1)
    machine.step()
    model, price = machine.model, machine.model._price
    for waiting, cost in ((0.0, 0.1), (0.3, 0.4)):
        before = price._balance
        machine.have[0] = machine.lengths[0] - 1
        assert not model.drafts(1, 1, {0: 1}, machine, waiting=None)
        assert price._balance == before, "it is not measured"
        model.drafts(1, 1, {0: 1}, machine, waiting=waiting)
        assert before - price._balance == pytest.approx(cost)


def test_nothing_is_chosen_before_a_pass_is_measured():
    price = ModelPrice(lambda rows: 1.0)
    price.assign_slot(0)
    assert price.choose(1, 1, {0: 1}, {0: 4}) == {}
    assert price.catch_up_rows(1) == 0, "no step is measured: the account is not open"
    price.stepped(1.0)
    assert price.catch_up_rows(1) > 0


def test_the_account():
    price = ModelPrice(lambda rows: float(rows))
    price.stepped(1.0)
    price.spent(FIRST_STEPS + ALLOWANCE - 0.001)
    assert price.in_credit
    price.spent(0.002)
    assert not price.in_credit
    price.saved(2, 2, 2)  # 4 - 2 seconds more for two tokens of a second each
    assert not price.in_credit
    price.saved(2, 2, 3)
    assert price.in_credit


def test_seconds_of_passes():
    passes = PassSeconds()
    assert passes(3) is None
    passes.measured(2, 1.0)
    assert (passes(1), passes(2), passes(4)) == (1.0, 1.0, 2.0)
    passes.measured(10, 5.0)
    assert (passes(6), passes(20)) == (3.0, 10.0)
