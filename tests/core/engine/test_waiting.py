"""The line against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.phase import Fact
from baton.core.engine.request import Group, Sequence
from baton.core.engine.waiting import WaitingQueue
from baton.protocol.ids import BlockKey

from .harness import Driver, make_request


def sequence_at(priority: int, counter: int) -> Sequence:
    return Sequence(Group(make_request("a"), deadline=None), 0, (priority, 0.0, counter), BlockKey(b"root"))


@given(st.lists(st.tuples(st.sampled_from(["join", "pop", "end"]), st.integers(-2, 2), st.integers(0, 1000)), max_size=60))
def test_head_is_always_the_smallest_order(actions):
    line, model = WaitingQueue(), []
    for arrival, (action, priority, number) in enumerate(actions):
        if action == "join":
            model.append(sequence_at(priority, arrival))
            line.join(model[-1])
        elif model and action == "pop":
            head = min(model, key=lambda s: s.order)
            assert line.head() is head
            line.pop()
            model.remove(head)
        elif model:
            gone = model.pop(number % len(model))
            gone.advance(Fact.ENDED)
            line.leave(gone)
        assert len(line) == len(model)
        assert line.head() is min(model, key=lambda s: s.order, default=None)


def test_those_that_left_do_not_pile_up():
    """Invariant 49: a thousand come and go while one waits."""
    line = WaitingQueue()
    first = sequence_at(0, 0)
    line.join(first)
    for arrival in range(1, 1000):
        gone = sequence_at(1, arrival)
        line.join(gone)
        gone.advance(Fact.ENDED)
        line.leave(gone)
    assert line.head() is first
    assert len(line._heap) <= 2 * len(line) + 65


def test_order_survives_many_aborts():
    driver = Driver(slots=1, requests_max=400)
    for number in range(300):
        driver.submit(f"r{number}", (number % 100, number // 100), max_tokens=1)
    kept = [f"r{number}" for number in range(300) if number == 0 or number % 37 == 5]
    for number in range(299, -1, -1):
        if f"r{number}" not in kept:
            driver.abort(f"r{number}")
    driver.run()
    assert driver.admissions == kept
    for name in kept:
        driver.assert_answered(name)
    driver.assert_at_rest()
