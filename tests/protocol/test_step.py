"""The only place where an int is compared with a sentinel, and where a result is held against its plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.protocol.codec import decode, encode
from baton.protocol.step import (
    PREEMPTED_TOKEN_ID,
    BatchRows,
    NewSequence,
    RowFailure,
    Rows,
    StepPlan,
    StepResult,
    read_rows,
)

LAST, MIDDLE, DROP = "last", "middle", "drop"
"""What a plan can ask of a slot: run to the end of what is known, run a chunk in the middle of its prompt, drop it."""


Values = int | tuple[int, ...]


def read(asked: list[str], answered: list[Values], failures: tuple[RowFailure, ...] = (), late: int = 0) -> Rows:
    """Slot i is asked for `asked[i]` and answers `answered[i]`, one value or several. Then come `late` rows of others."""
    runs = [slot for slot, what in enumerate(asked) if what != DROP]
    drops = [slot for slot, what in enumerate(asked) if what == DROP]
    plan = StepPlan(1, 1, drops=tuple((slot, 1) for slot in drops), run=BatchRows(tuple(runs), (1,) * len(runs)))
    unfinished = tuple(slot for slot in runs if asked[slot] == MIDDLE)
    rows = [(slot, 1, value if isinstance(value := answered[slot], tuple) else (value,)) for slot in (*runs, *drops)]
    return read_rows(plan, unfinished, StepResult.of(1, 1, [*rows, *[(9, 1, (77,))] * late], failures))


def test_the_sentinel_is_what_the_pages_say():
    assert PREEMPTED_TOKEN_ID == -9


@pytest.mark.parametrize("token", [0, 1, 9, 2**31 - 1])
@pytest.mark.parametrize("others", [([], []), ([MIDDLE, DROP], [(), -9])])
def test_token_zero_is_a_token_like_any_other(token, others):
    asked, answered = others
    rows = read([LAST, *asked], [token, *answered])
    assert rows.sampled == [(0, token)]


def test_an_empty_row_is_a_chunk_that_is_not_the_last():
    rows = read([MIDDLE], [()])
    assert (rows.sampled, rows.chunks, rows.acks) == ([], [0], [])


def test_minus_nine_is_an_acknowledgement():
    rows = read([DROP], [-9])
    assert (rows.sampled, rows.chunks, rows.acks) == ([], [], [0])


def test_empty_plan_has_no_rows():
    rows = read([], [])
    assert (rows.sampled, rows.chunks, rows.acks) == ([], [], [])


@pytest.mark.parametrize("value", [-1, -2, -8, -10, -(2**31), -100])
@pytest.mark.parametrize("asked", [LAST, MIDDLE, DROP])
@pytest.mark.parametrize("others", [([], []), ([LAST], [5]), ([MIDDLE, DROP], [(), -9])])
def test_other_negatives_have_no_meaning(value, asked, others):
    with pytest.raises(ProtocolError):
        read([asked, *others[0]], [value, *others[1]])


@pytest.mark.parametrize("value", [2**31, 2**32, 2**63 - 1])
@pytest.mark.parametrize("others", [([], []), ([MIDDLE, DROP], [(), -9])])
def test_value_beyond_int32_has_no_meaning(value, others):
    with pytest.raises(ProtocolError):
        read([LAST, *others[0]], [value, *others[1]])


RIGHT = {LAST: [0, 7], MIDDLE: [()], DROP: [PREEMPTED_TOKEN_ID]}


@pytest.mark.parametrize("asked", RIGHT)
@pytest.mark.parametrize("value", [0, 7, (), (7, 8), (PREEMPTED_TOKEN_ID,) * 2, (7, PREEMPTED_TOKEN_ID), PREEMPTED_TOKEN_ID])
@pytest.mark.parametrize("others", [([], []), ([LAST], [5]), ([MIDDLE], [()]), ([DROP], [-9])])
def test_answer_must_be_what_was_asked_for(asked, value, others):
    if value in RIGHT[asked]:
        read([asked, *others[0]], [value, *others[1]])
    else:
        with pytest.raises(ProtocolError):
            read([asked, *others[0]], [value, *others[1]])


@given(st.lists(st.sampled_from([LAST, MIDDLE, DROP]), max_size=8), st.integers(0, 2), st.data())
def test_every_row_is_read_once_and_in_order(asked, late, data):
    answered = [data.draw(st.integers(0, 50)) if what == LAST else RIGHT[what][0] for what in asked]
    rows = read(asked, answered, late=late)
    assert rows.sampled == [(slot, answered[slot]) for slot, what in enumerate(asked) if what == LAST]
    assert rows.chunks == [slot for slot, what in enumerate(asked) if what == MIDDLE]
    assert rows.acks == [slot for slot, what in enumerate(asked) if what == DROP]


def test_failed_row_has_no_token():
    failure = (RowFailure(0, 1, "NaN in the logits"),)
    assert read([LAST, LAST], [(), 5], failure).sampled == [(1, 5)]
    with pytest.raises(ProtocolError):
        read([LAST, LAST], [5, ()], failure)


def drafted(length: int, planned: int = 3, made: int = 2, **more: object) -> Rows:
    """A row with drafts and one without."""
    plan = StepPlan(1, 1, run=BatchRows((0, 1), (1, 1), (planned, 0)))
    values = (*range(length), 7)
    return read_rows(plan, (), StepResult(1, 1, (0, 1), (1, 1), (length, 1), values, drafted=(made, 0), **more))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_row_answers_one_token_and_its_accepted_drafts(length):
    rows = drafted(length)
    assert (rows.sampled, rows.drafted) == ([(1, 7)], [(0, tuple(range(length)), 3, 2)])


@pytest.mark.parametrize("wrong", [{"length": 0}, {"length": 4}, {"length": 1, "made": 4}, {"length": 1, "made": -1}])
def test_a_row_answers_neither_more_than_it_drafted_nor_nothing(wrong):
    with pytest.raises(ProtocolError):
        drafted(**wrong)


def test_a_failed_row_with_drafts_has_no_token():
    rows = drafted(0, failures=(RowFailure(0, 1, "NaN in the logits"),))
    assert (rows.sampled, rows.drafted, rows.chunks) == ([(1, 7)], [], [0])


@pytest.mark.parametrize("made", [(1,), (0,), (0, 0)])
def test_drafts_that_were_not_planned(made):
    plan = StepPlan(1, 1, run=BatchRows((0,), (1,)))
    result = StepResult(1, 1, (0,), (1,), (1,), (7,), drafted=made)
    if made == (0,):
        assert read_rows(plan, (), result).sampled == [(0, 7)]
    else:
        with pytest.raises(ProtocolError):
            read_rows(plan, (), result)


@pytest.mark.parametrize("columns", [((1,), (1,), ()), ((1,), (), (1,)), ((), (1,), (1,)), ((1, 2), (1, 2), (1,))])
def test_columns_of_unequal_length(columns):
    for plan in (StepPlan(1, 1), StepPlan(1, 1, run=BatchRows((1,), (1,)))):
        with pytest.raises(ProtocolError, match="differ in length"):
            read_rows(plan, (), StepResult(1, 1, *columns, (5,) * sum(columns[2])))


@pytest.mark.parametrize(
    ("lengths", "values"), [((1,), ()), ((0,), (5,)), ((1,), (5, 5)), ((-1,), ()), ((2,), (5,)), ((2**62,), (5,))]
)
def test_lengths_must_be_those_of_the_values(lengths, values):
    with pytest.raises(ProtocolError, match="lengths of the rows"):
        read_rows(StepPlan(1, 1, run=BatchRows((1,), (1,))), (), StepResult(1, 1, (1,), (1,), lengths, values))


def test_a_negative_length_is_not_made_up_for_by_another():
    plan = StepPlan(1, 1, run=BatchRows((1, 2), (1, 1)))
    with pytest.raises(ProtocolError, match="lengths of the rows"):
        read_rows(plan, (), StepResult(1, 1, (1, 2), (1, 1), (3, -1), (5, 5)))


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4).map(tuple), max_size=8))
def test_rows_of_any_lengths_survive_the_wire(values):
    rows = [(slot, slot + 1, value) for slot, value in enumerate(values)]
    result = decode(encode(StepResult.of(1, 1, rows)))
    assert result.rows == rows
    assert (result.lengths, len(result.values)) == (tuple(map(len, values)), sum(map(len, values)))


@pytest.mark.parametrize("slots", [(), (1,), (2, 1), (1, 1), (1, 3), (3, 1, 2)])
def test_rows_must_be_those_of_the_plan(slots):
    plan = StepPlan(1, 1, run=BatchRows((1, 2), (1, 1)))
    with pytest.raises(ProtocolError):
        read_rows(plan, (), StepResult.of(1, 1, [(slot, 1, (5,)) for slot in slots]))


def test_plan_says_what_it_asks_for():
    plan = StepPlan(1, 1, drops=((5, 2), (6, 3)), run=BatchRows((1, 2), (4, 1)))
    assert plan.rows == (1, 2, 5, 6)
    assert plan.tokens == 5
    assert StepPlan(2, 1).rows == ()
    assert StepPlan(2, 1).tokens == 0


@pytest.mark.parametrize("message", [StepPlan(1, 1), StepResult(1, 1), BatchRows()])
def test_what_crosses_the_boundary_is_frozen(message):
    with pytest.raises(AttributeError):
        setattr(message, message.__struct_fields__[0], 7)


def test_new_sequence_is_told_in_full():
    told = {*NewSequence.__struct_fields__}
    known = {"slot", "incarnation", "tokens", "prompt_tokens", "computed_tokens", "blocks", "sampling", "index", "adapter"}
    assert told == known
