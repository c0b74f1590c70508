"""The states of a routed request: complete, without dead ends, and the picture in the docs is the one that it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.cluster.handoff_table import LATE, NEXT, REPORTED, RequestAction, RequestFact, RequestState, draw

S, F, A = RequestState, RequestFact, RequestAction
DOCS = Path(__file__).parents[3] / "docs" / "internals" / "handoff.md"
PLACED = (F.PLACED_WHOLE, F.PLACED_PAIR)


def cannot_happen(state, fact):
    """Never asked: nobody has a queued request, a request that is done is forgotten, it is placed from the queue,
    and who serves a request alone has no prefill instance beside it."""
    if state is S.DONE:
        return True
    if state is S.QUEUED:
        return fact not in (*PLACED, F.CLOSED)
    return fact in PLACED or (state is S.SERVING and fact in (F.PREFILL_LOST, F.LEADER_OVER))


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("fact", F)
def test_every_pair_is_in_the_table_or_late_or_cannot_happen(state, fact):
    assert [(state, fact) in NEXT, (state, fact) in LATE, cannot_happen(state, fact)].count(True) == 1


def test_only_what_instances_tell_can_be_late():
    assert all(fact in REPORTED for _, fact in LATE)


@pytest.mark.parametrize("state", [state for state in S if state is not S.DONE])
def test_every_state_can_be_closed_and_lost(state):
    assert NEXT[state, F.CLOSED][0] is S.DONE
    if state is not S.QUEUED:
        assert NEXT[state, F.DECODER_LOST][0] is S.QUEUED
        assert NEXT[state, F.BROKEN][0] is S.QUEUED


def test_who_goes_back_in_line_has_another_attempt_and_nobody_keeps_anything():
    """Lost: no. Whoever else may have something of it is told to forget it."""
    may_have = {
        S.RESERVING: {A.FORGET_DECODER},
        S.PREFILLING: {A.FORGET_PREFILL, A.FORGET_DECODER},
        S.HANDING: {A.FORGET_PREFILL, A.FORGET_DECODER},
        S.SERVING: {A.FORGET_DECODER},
    }
    has_nothing = {
        (S.RESERVING, F.REFUSED): {A.FORGET_DECODER},
        (S.SERVING, F.REFUSED): {A.FORGET_DECODER},
        (S.SERVING, F.ENDED): {A.FORGET_DECODER},
    }
    for (state, fact), (after, actions) in NEXT.items():
        if state is S.QUEUED or after not in (S.QUEUED, S.DONE):
            continue
        lost = {F.DECODER_LOST: {A.FORGET_DECODER}, F.PREFILL_LOST: {A.FORGET_PREFILL}}.get(fact, set())
        told = {action for action in actions if action in (A.FORGET_PREFILL, A.FORGET_DECODER)}
        assert told == may_have[state] - lost - has_nothing.get((state, fact), set()), (state, fact)
        assert (A.REQUEUE in actions) == (after is S.QUEUED)
        assert actions[-1:] == ((A.REQUEUE,) if after is S.QUEUED else actions[-1:])


def test_refusals_and_ends_are_no_losses():
    counted = {fact for (_, fact), (_, actions) in NEXT.items() if A.COUNT_LOSS in actions}
    assert counted == {F.DECODER_LOST, F.PREFILL_LOST, F.BROKEN}


def test_done_is_reached_from_everywhere():
    reached = {S.DONE}
    for _ in S:
        reached |= {state for (state, _), (after, _) in NEXT.items() if after in reached}
    assert reached == set(S)


def test_drawing_in_the_docs_is_current():
    """Otherwise: python -c 'from baton.core.cluster.handoff_table import draw; print(draw())', between the markers."""
    text = DOCS.read_text()
    shown = text.split("<!-- trip: begin -->")[1].split("<!-- trip: end -->")[0]
    assert shown.strip() == f"```mermaid\n{draw()}\n```"
