"""Deadlines by heap do what a dictionary and `min` do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.deadlines import Deadlines

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("discard"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("due"), st.just(0), st.integers(0, 20)),
    ),
    max_size=200,
)


@given(ACTS)
def test_any_history_is_that_of_a_dictionary(acts):
    naive: dict[int, float] = {}
    made: Deadlines[int] = Deadlines()
    for act, key, at in acts:
        if act == "set":
            naive[key] = at
            made.set(key, at)
        elif act == "discard":
            naive.pop(key, None)
            made.discard(key)
        else:
            passed = made.due(at)
            assert sorted(passed) == sorted(key for key, when in naive.items() if when <= at)
            assert [naive[key] for key in passed] == sorted(naive[key] for key in passed)
            for key in passed:
                del naive[key]
        assert made.earliest == min(naive.values(), default=None)
        assert len(made) == len(naive)
        assert all(key in made for key in naive)
    for key in list(naive):
        made.discard(key)
    assert not made._heap, "nothing is left of what has no deadline"


def test_a_deadline_that_is_renewed_again_and_again_takes_no_more_room():
    made: Deadlines[str] = Deadlines()
    for at in range(10_000):
        made.set("lease", at)
        made.set("first", 0)
    assert len(made._heap) <= 2 * len(made) + 65
    assert made.earliest == 0
