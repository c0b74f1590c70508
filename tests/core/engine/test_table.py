"""The table of a sequence's life is the whole truth: a pair that is not in it cannot happen."""

from itertools import product

import pytest

from baton.core.engine.phase import NEXT, ON_WORKER, OPEN, Fact, Phase
from baton.core.engine.request import Group, Sequence
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey

from .harness import make_request


def sequence_in(phase: Phase) -> Sequence:
    sequence = Sequence(Group(make_request("a"), deadline=None), 0, (0, 0.0, 0), BlockKey(b"root"))
    sequence.phase = phase
    return sequence


@pytest.mark.parametrize(("phase", "fact"), list(product(Phase, Fact)))
def test_every_pair_is_in_the_table_or_raises(phase, fact):
    sequence = sequence_in(phase)
    if (phase, fact) in NEXT:
        sequence.advance(fact)
        assert sequence.phase is NEXT[phase, fact]
    else:
        with pytest.raises(InvariantBroken):
            sequence.advance(fact)
        assert sequence.phase is phase


def test_nothing_follows_done():
    assert not [fact for phase, fact in NEXT if phase is Phase.DONE]


def test_every_phase_can_be_reached_and_left_towards_done():
    def reachable(start: Phase) -> list[Phase]:
        found = [start]
        for phase in found:
            found += [to for (at, _), to in NEXT.items() if at is phase and to not in found]
        return found

    from_start = reachable(Phase.HELD)
    assert sorted(phase.value for phase in from_start) == sorted(phase.value for phase in Phase)
    assert all(Phase.DONE in reachable(phase) for phase in Phase)


def test_a_client_is_told_of_an_end_in_every_open_phase_and_in_no_other():
    assert {phase for phase, fact in NEXT if fact is Fact.ENDED} == set(OPEN)


def test_every_phase_with_a_slot_survives_the_loss_of_the_worker():
    assert {phase for phase, fact in NEXT if fact is Fact.WORKER_LOST} == {*ON_WORKER, Phase.PREEMPTING, Phase.CLOSING}
