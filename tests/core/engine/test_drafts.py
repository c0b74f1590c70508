"""Speculative decoding in the core: rows of several tokens, a bound that results lower, and ends inside a row."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from baton.protocol.request import FinishReason
from baton.protocol.step import RowLogprobs, StepPlan, StepResult, TokenLogprob

from .harness import Driver, FakeWorker

REFUSED = -1
"""Mark of a position that holds a refused draft: it changes every token that reads it."""


class DraftingWorker(FakeWorker):
    """Makes as many drafts as planned, of which `true` are right."""

    def __init__(self, block_size: int, true: int) -> None:
        super().__init__(block_size)
        self.true = true

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if not plan.run.drafts:
            return result
        rows, logprobs = [], list[RowLogprobs]()
        for place, (slot, incarnation, values) in enumerate(result.rows):
            drafts = plan.run.drafts[place] if place < len(plan.run.slots) else 0
            more = [self._compute(slot, 1)[0] for _ in range(min(drafts, self.true))]
            rows.append((slot, incarnation, (*values, *more)))
            state = self.states.get(slot)
            for position in range(state.computed, state.computed + drafts - len(more)) if state else ():
                self.memory[self._place(state, position)] = REFUSED
            if state and state.sampling.logprobs is not None and place < len(plan.run.slots):
                tokens = (*values, *more)
                logprobs += [RowLogprobs(slot, incarnation, TokenLogprob(token, -0.5, 1)) for token in tokens]
        made = StepResult.of(plan.step, plan.epoch, rows, result.failures, tuple(logprobs))
        return replace(made, drafted=plan.run.drafts)


def driver(true: int, **settings: Any) -> Driver:
    one = Driver(**{"drafts_max": 3, **settings})
    one.worker = DraftingWorker(one.config.kv.block_size, true)
    return one


@pytest.mark.parametrize("true", [0, 1, 3])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4])
def test_any_acceptance_gives_the_undisturbed_tokens(true, steps_in_flight, block_size):
    one = driver(true, steps_in_flight=steps_in_flight, block_size=block_size, blocks=120 // block_size)
    for name in "abc":
        one.submit(name, prompt=range(5), max_tokens=21, seed=ord(name))
    one.run()
    assert {len(tokens) for tokens in one.tokens.values()} == {21}
    stats = one.instance.stats
    assert stats.output_tokens == 63
    assert len(stats.accepted_drafts) == true


def test_accepted_drafts_make_fewer_steps():
    plain, drafting = driver(0, steps_in_flight=1), driver(3, steps_in_flight=1)
    for one in (plain, drafting):
        one.submit("a", max_tokens=41)
        one.run()
    assert one.tokens == plain.tokens
    assert (len(plain.history), len(drafting.history)) == (42, 12)  # 1 + 40 + the drop; 1 + 10 + the drop


def test_the_result_lowers_the_bound():
    one = driver(0, steps_in_flight=1)
    one.submit("a", prompt=(1, 2, 3), max_tokens=30)
    one.step()
    assert one.history[-1].run.drafts == (3,)
    assert (one.sequence("a").scheduled, one.sequence("a").drafts) == (7, 3)
    one.step()
    assert (one.sequence("a").computed, one.sequence("a").scheduled) == (4, 8)


def test_drafts_stay_within_the_length():
    one = driver(3, steps_in_flight=1)
    one.submit("a", prompt=(1, 2, 3), max_tokens=4)
    one.run()
    assert [plan.run.drafts for plan in one.history[1:-1]] == [(2,)]


def test_drafts_count_in_the_budget_and_prompts_come_first():
    one = driver(0, slots=3, tokens_per_step=6, steps_in_flight=1)
    for name in "abc":
        one.submit(name, prompt=(1, 2), max_tokens=9)
    one.run()
    assert all(plan.tokens <= 6 for plan in one.history)
    decoding = [plan.run.drafts for plan in one.history if len(plan.run.slots) == 3 and not plan.new]
    assert decoding[0] == (3, 0, 0)
    assert not any(plan.run.drafts for plan in one.history if max(plan.run.counts, default=1) > 1 or plan.new)


@pytest.mark.parametrize(("sequences", "drafts"), [(64, True), (65, False)])
def test_many_sequences_do_not_draft(sequences, drafts):
    one = driver(0, slots=80, tokens_per_step=400, blocks=300, steps_in_flight=1)
    for number in range(sequences):
        one.submit(f"r{number}", prompt=(number,), max_tokens=3)
    one.run()
    decoding = [plan for plan in one.history if len(plan.run.slots) == sequences and not plan.new]
    assert decoding
    assert any(plan.run.drafts for plan in decoding) == drafts


@pytest.mark.parametrize("drafts", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_refused_drafts_in_flight_need_no_block(steps_in_flight, drafts):
    """Two sequences of at most one block, in a pool of two. Positions in flight may lie behind it; tokens do not."""
    runs = [driver(0, blocks=2, block_size=16, steps_in_flight=steps_in_flight, drafts_max=most) for most in (0, drafts)]
    plain = Driver()
    for prompt in ((1, 2, 3), (2, 2, 3)):
        plain.submit("a", prompt=prompt, max_tokens=12)
        plain.run()
        for one in runs:
            one.submit(f"from {prompt[0]}", prompt=prompt, max_tokens=20, stop_token_ids=(plain.tokens["a", 0][11],))
    for one in runs:
        one.run()
    assert one.instance.stats.drafts > 0
    assert [one.instance.stats.preemptions for one in runs] == [0, 0]
    assert len(runs[0].history) == len(runs[1].history)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_no_block_is_taken_for_a_draft_that_a_decode_may_need(steps_in_flight):
    one = driver(0, blocks=4, block_size=4, steps_in_flight=steps_in_flight)
    one.submit("a", prompt=(1, 2, 3), max_tokens=6)
    one.submit("b", prompt=(4, 5, 6), max_tokens=6)
    one.run()
    assert one.instance.stats.preemptions == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_blocks_are_taken_early_for_drafts_unless_a_request_waits(steps_in_flight, waits):
    """Of 40 blocks "wide" needs 39 and waits until "a" ends: meanwhile every block of "a" is one that its tokens fill."""
    one = driver(3, blocks=40, block_size=4, steps_in_flight=steps_in_flight, tokens_per_step=200)
    one.submit("a", prompt=(1, 2, 3), max_tokens=30)
    if waits:
        one.submit("wide", prompt=range(155), max_tokens=1)
    early = False
    while "a" in one.sequences and not one.ended:
        one.step()
        sequence = one.sequence("a")
        if len(sequence.tokens) > 12 and sequence.blocks:  # "a" was planned before "wide" came
            early |= sequence.capacity - 4 >= sequence.scheduled - sequence.drafts
    one.run()
    assert early != waits
    assert one.instance.stats.drafts > 0


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_stop_token_inside_a_row_ends_there(stop):
    plain = Driver()
    plain.submit("a", prompt=range(7), max_tokens=20)
    plain.run()
    token = plain.tokens["a", 0][stop]
    one = driver(3, steps_in_flight=2)
    one.submit("a", prompt=range(7), max_tokens=20, stop_token_ids=(token,), logprobs=1)
    one.run()
    first = plain.tokens["a", 0].index(token)
    assert one.tokens["a", 0] == plain.tokens["a", 0][: first + 1]
    assert one.ended["a", 0].reason is FinishReason.STOP
    assert [row.sampled.token for row in one.logprobs["a", 0]] == one.tokens["a", 0]


def test_only_accepted_tokens_are_cached():
    one = driver(1, block_size=2, steps_in_flight=2)
    one.submit("a", prompt=range(6), max_tokens=15)
    one.run()
    again = tuple(range(6)) + tuple(one.tokens["a", 0])
    one.submit("b", prompt=again, max_tokens=5)  # reads every block of the first answer
    one.run()
    assert one.ended["b", 0].cached_tokens == 20


def test_preempted_with_drafts_in_flight():
    one = driver(2, steps_in_flight=3)
    one.submit("a", prompt=range(5), max_tokens=30)
    one.step(3)
    one.preempt()
    one.run()
    assert one.instance.stats.preemptions == 1


def test_a_lost_worker_takes_its_drafts_along():
    one = driver(2, steps_in_flight=3)
    one.submit("a", prompt=range(5), max_tokens=30)
    one.step(3)
    one.lose_worker()
    one.restart_worker()
    one.worker = DraftingWorker(one.config.kv.block_size, 2)
    one.run()
    assert len(one.tokens["a", 0]) == 30


def test_a_request_bounds_its_drafts():
    """Beside others: 0 is off, and more than the instance's own bound changes nothing."""
    one = driver(3, steps_in_flight=1)
    bounds = {"off": 0, "two": 2, "many": 100, "none": None}
    for name, most in bounds.items():
        one.submit(name, prompt=range(5), max_tokens=20, drafts_max=most)
    one.run()
    ends = {name: one.ended[name, 0] for name in bounds}
    assert {name: (end.drafted_tokens > 0, end.accepted_tokens > 0) for name, end in ends.items()} == {
        name: (name != "off",) * 2 for name in bounds
    }
    assert max(max(plan.run.drafts, default=0) for plan in one.history) == 3
    assert one.tokens["many", 0] == one.tokens["none", 0] == one.tokens["off", 0]


@pytest.mark.parametrize("true", [0, 1, 3])
def test_the_end_counts_drafts(true):
    one = driver(true, steps_in_flight=2)
    one.submit("a", prompt=range(5), max_tokens=21)
    one.run()
    end, stats = one.ended["a", 0], one.instance.stats
    assert end.drafted_tokens == stats.drafts > 0
    assert 0 <= sum(stats.accepted_drafts) - end.accepted_tokens <= 3  # the last row may have tokens behind the end
