"""Steps that are launched before the tokens of the one before are known: feedback, late failures, drops in flight."""

from __future__ import annotations

import pytest
from late_executor import LateExecutor, expected
from rig import TINY
from test_model_runner import new, plan

from baton.errors import InvariantBroken
from baton.kvpool.layout import KVKind
from baton.kvpool.pool import KVPool
from baton.protocol.ids import BlockId, Incarnation, Slot
from baton.protocol.request import SamplingParams
from baton.protocol.step import PREEMPTED_TOKEN_ID
from baton.worker.failure import Failure
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner


@pytest.fixture
def executor():
    return LateExecutor(at_once=True)


@pytest.fixture
def runner(executor):
    runner = ModelRunner(executor, KVPool.create(kv_layout(TINY, 4, KVKind("float32")), 16), slots=4)
    yield runner
    runner.close()


def test_a_token_that_is_not_known_yet_is_fed_back(executor, runner):
    a, b = expected([1, 2, 3], 4), expected([9], 4)
    first = runner.submit(plan(1, new=(new(2, [1, 2, 3]), new(0, [9], blocks=(9,))), run=[(2, 3), (0, 1)]))
    second = runner.submit(plan(2, run=[(0, 1), (2, 1)]))
    assert runner.collect(first).values == (a[0], b[0])
    third = runner.submit(plan(3, run=[(0, 1), (2, 1)]))
    assert runner.collect(second).values == (b[1], a[1])
    assert runner.collect(third).values == (b[2], a[2])
    fourth = runner.submit(plan(4, run=[(0, 1), (2, 1)]))  # nothing is under way: the host knows all tokens
    assert runner.collect(fourth).values == (b[3], a[3])
    assert [late.fed_back for late in executor.launched] == [[], [0, 2], [0, 2], []]
    assert runner.batch.outputs(2).tolist() == a


def test_a_chunk_beside_a_token_that_is_fed_back(executor, runner):
    a, b = expected([7], 3), expected(list(range(9)), 2)
    in_flight_steps = [runner.submit(plan(1, new=(new(1, [7], blocks=(9,)), new(0, range(9))), run=[(1, 1), (0, 4)]))]
    in_flight_steps.append(runner.submit(plan(2, run=[(0, 5), (1, 1)])))
    assert runner.collect(in_flight_steps[0]).values == (a[0],)
    in_flight_steps.append(runner.submit(plan(3, run=[(1, 1), (0, 1)])))
    assert [runner.collect(in_flight).values for in_flight in in_flight_steps[1:]] == [(b[0], a[1]), (a[2], b[1])]
    assert [late.fed_back for late in executor.launched] == [[], [1], [1, 0]]


def test_as_many_as_may_be_and_in_order(runner):
    first = runner.submit(plan(1, new=(new(0, [1]),), run=[(0, 1)]))
    second = runner.submit(plan(2, run=[(0, 1)]))
    assert runner.must_wait(plan(3, run=[(0, 1)]))
    with pytest.raises(InvariantBroken, match="2 are under way"):
        runner.submit(plan(3, run=[(0, 1)]))
    with pytest.raises(InvariantBroken, match="out of order"):
        runner.collect(second)
    runner.collect(first)
    assert not runner.must_wait(plan(3, run=[(0, 1)]))
    runner.collect(second)


def test_a_waiting_plan_is_applied_while_the_step_before_runs(executor, runner):
    """All but its tokens: new blocks are in the table, on the device too, before the earlier step is done."""
    sent: list[list[int]] = []
    executor.send_tables = lambda sequences: sent.append(sequences.take_table_changes()[2].tolist())
    settings = (SamplingParams(presence_penalty=0.5),)
    first = runner.submit(plan(1, new=(new(0, [1, 2, 3], blocks=(7,)),), sampling=settings, run=[(0, 3)]))
    runner.batch.take_table_changes()
    second = plan(2, grown=((Slot(0), BlockId(9)),), run=[(0, 1)])
    assert runner.must_wait(second)
    for _ in range(2):  # once, however often it is asked
        runner.apply(second)
    assert sent == [[9]]
    assert runner.batch.rooms[0] == 8
    runner.finish(first)
    second = runner.submit(second)
    assert first.result().values == (expected([1, 2, 3], 1)[0],), "its result is not needed before the next launch"
    assert runner.collect(second).values == (expected([1, 2, 3], 2)[1],)


def test_a_waiting_plan_with_other_sequences_is_applied_when_it_is_submitted(runner):
    """The running step still belongs to the sequence that the plan drops."""
    settings = (SamplingParams(presence_penalty=0.5),)
    first = runner.submit(plan(1, new=(new(0, [1, 2]),), sampling=settings, run=[(0, 2)]))
    second = plan(2, drops=((Slot(0), Incarnation(1)),), new=(new(0, [9], incarnation=2),), run=[(0, 1)])
    runner.apply(second)
    assert runner.batch.incarnations[0] == 1
    runner.finish(first)
    assert runner.batch.outputs(0).tolist() == expected([1, 2], 1)
    assert runner.collect(runner.submit(second)).values[0] == expected([9], 1)[0]
    assert first.result().values == (expected([1, 2], 1)[0],)


def test_a_failure_is_known_one_step_late(executor, runner):
    executor.fails[0, 1] = Failure("sick")
    a = expected([1, 2], 3)
    first = runner.submit(plan(1, new=(new(0, [1, 2]), new(1, [5], blocks=(9,))), run=[(0, 2), (1, 1)]))
    second = runner.submit(plan(2, run=[(0, 1), (1, 1)]))
    results = [runner.collect(first)]
    third = runner.submit(plan(3, drops=((Slot(1), Incarnation(1)),), run=[(0, 1)]))  # before the second step is collected
    results += [runner.collect(second), runner.collect(third)]
    for result, token in zip(results[:2], a, strict=False):
        assert (result.lengths, result.values) == ((1, 0), (token,))
        assert [(f.slot, f.incarnation, f.reason) for f in result.failures] == [(1, 1, "sick")]
    assert (results[2].values, results[2].failures) == ((a[2], PREEMPTED_TOKEN_ID), ())


def test_what_failed_is_not_computed_any_more(executor, runner):
    executor.fails[0, 1] = Failure("sick")
    first = runner.submit(plan(1, new=(new(0, [1, 2]), new(1, [5], blocks=(9,))), run=[(0, 2), (1, 1)]))
    runner.collect(first)
    result = runner.execute(plan(2, run=[(1, 1), (0, 1)]))
    assert (result.lengths, [f.slot for f in result.failures]) == ((0, 1), [1])
    assert len(executor.launched[1].sampled.tokens) == 1


def test_a_slot_is_dropped_and_taken_while_its_step_is_under_way(executor, runner):
    executor.fails[0, 3] = Failure("of the one before")
    first = runner.submit(plan(1, new=(new(0, [1, 2]), new(3, [4], blocks=(9,))), run=[(0, 2), (3, 1)]))
    drops = ((Slot(0), Incarnation(1)), (Slot(3), Incarnation(1)))
    taken = (new(0, [8, 8, 8], incarnation=2), new(3, [6], incarnation=2, blocks=(10,)))
    second = runner.submit(plan(2, drops=drops, new=taken, run=[(0, 3), (3, 1)]))
    result = runner.collect(first)
    assert (result.incarnations, result.lengths, result.values) == ((1, 1), (1, 0), (expected([1, 2], 1)[0],))
    third = runner.submit(plan(3, run=[(0, 1), (3, 1)]))
    a, b = expected([8, 8, 8], 2), expected([6], 2)
    result = runner.collect(second)
    assert (result.values, result.failures) == ((a[0], b[0], PREEMPTED_TOKEN_ID, PREEMPTED_TOKEN_ID), ())
    assert runner.collect(third).values == (a[1], b[1]), "the late token of the one before is nobody's"
    assert runner.batch.tokens[0, :5].tolist() == [8, 8, 8, *a]


def test_who_is_sampled_on_the_host_waits_for_the_tokens_before(runner):
    settings = (SamplingParams(), SamplingParams(presence_penalty=1.0))
    news = (new(0, [1], sampling=1), new(1, [2], blocks=(9,)))
    begin = plan(1, new=news, sampling=settings, run=[(0, 1), (1, 1)])
    assert not runner.must_wait(begin), "nothing is under way"
    first = runner.submit(begin)
    assert runner.must_wait(plan(2, run=[(1, 1), (0, 1)]))
    assert not runner.must_wait(plan(2, run=[(1, 1)]))
    assert runner.must_wait(plan(2, sampling=settings, new=(new(2, [5], blocks=(10,), sampling=1),), run=[(1, 1), (2, 1)]))
    runner.collect(first)


def test_a_plan_that_computes_nothing_keeps_its_place(executor, runner):
    first = runner.submit(plan(1, new=(new(0, [1]),), run=[(0, 1)]))
    second = runner.submit(plan(2, drops=((Slot(0), Incarnation(1)),)))
    assert runner.collect(first).values == (expected([1], 1)[0],)
    assert runner.collect(second).values == (PREEMPTED_TOKEN_ID,)
    assert len(executor.launched) == 1


def test_tables_and_lengths_advance_without_values(runner):
    """A block is needed for a token that nobody has seen."""
    first = runner.submit(plan(1, new=(new(0, [1, 2, 3], blocks=(0,)),), run=[(0, 3)]))
    second = runner.submit(plan(2, run=[(0, 1)]))
    runner.collect(first)
    third = runner.submit(plan(3, grown=((Slot(0), BlockId(5)),), deduplicated=((Slot(0), 0, BlockId(7)),), run=[(0, 1)]))
    values = [runner.collect(in_flight).values[0] for in_flight in (second, third)]
    assert values == expected([1, 2, 3], 3)[1:]


def test_clearing_waits_for_what_is_under_way(executor, runner):
    runner.submit(plan(1, new=(new(0, [1]),), run=[(0, 1)]))
    runner.submit(plan(2, run=[(0, 1)]))
    runner.clear()
    assert executor.collected == 2
    assert runner.execute(plan(1, new=(new(0, [3]),), run=[(0, 1)])).values == (expected([3], 1)[0],)


# Copies of tables and columns on a device


def test_changes_of_tables_are_told_once(runner):
    runner.execute(plan(1, new=(new(2, [1, 2, 3], blocks=(4, 5)), new(0, [9], blocks=(9,))), run=[(2, 3), (0, 1)]))
    slots, places, blocks = (column.tolist() for column in runner.batch.take_table_changes())
    assert list(zip(slots, places, blocks, strict=True)) == [(2, 0, 4), (2, 1, 5), (0, 0, 9)]
    assert [column.size for column in runner.batch.take_table_changes()] == [0, 0, 0]
    runner.execute(plan(2, grown=((Slot(2), BlockId(7)),), deduplicated=((Slot(2), 1, BlockId(8)),), run=[(2, 1)]))
    slots, places, blocks = (column.tolist() for column in runner.batch.take_table_changes())
    assert list(zip(slots, places, blocks, strict=True)) == [(2, 1, 8), (2, 2, 7)]


def test_changes_of_sampling_are_told_once(runner):
    settings = (SamplingParams(temperature=0.5, top_k=3, seed=-1), SamplingParams())
    news = (new(1, [1]), new(3, [2], blocks=(9,), sampling=1))
    runner.execute(plan(1, new=news, sampling=settings, run=[(1, 1), (3, 1)]))
    columns = runner.sampling
    assert columns.take_changed().tolist() == [1, 3]
    assert columns.take_changed().size == 0
    assert [columns.draws["temperature"][slot] for slot in (1, 3)] == [0.5, 0.0]
    assert (int(columns.draws["top_k"][1]), int(columns.seeds[1])) == (3, 2**64 - 1)
