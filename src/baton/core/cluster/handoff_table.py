"""A request's routed request through the cluster, as data. The picture in docs/internals/handoff.md is drawn from it.

QUEUED      at the router; no instance has it                     -> placed: RESERVING (a pair) or SERVING (one instance)
RESERVING   decode was asked to keep room                         -> PREFILLING when it does
PREFILLING  prefill computes the prompt, decode pulls behind it   -> HANDING when all is computed
HANDING     decode copies the rest, and asks for the release      -> SERVING when it goes on by itself
SERVING     one instance has it for good                          -> DONE at its last end
DONE        nobody is owed anything, nobody has anything

`decoder` is the instance that answers the request: decode of a pair, or the one that does it all. `NEXT` is the program: the
coordinator (core/cluster/coordinator.py) carries its actions out. A pair that is neither there nor in `LATE` cannot happen.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class RequestState(Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    HANDING = "handing"
    SERVING = "serving"
    DONE = "done"


class RequestFact(Enum):
    """What happened. Facts that an instance tells are of the present attempt, and from the instance that may tell them: the
    coordinator lets no other through."""

    PLACED_WHOLE = "placed whole"
    PLACED_PAIR = "placed on a pair"
    RESERVED = "reserved"
    "Decode instance keeps room."
    REFUSED = "refused"
    "Decode instance or prefill does not take it."
    OFFERED = "offered"
    "Some of the prompt is computed."
    PREFILLED = "prefilled"
    "All of it is."
    ASKED = "release asked"
    RELEASED = "released"
    ADOPTED = "adopted"
    "Decode instance goes on by itself, with what it has."
    PREFILL_LOST = "prefill lost"
    HOME_LOST = "home lost"
    BROKEN = "broken"
    "An instance does not do what it should: no answer in time, a token is missing, an end that nobody asked for."
    LEFT = "instance leaves"
    "It was told to stop, and its time for what it has is over. Nobody failed: no loss of this request."
    LEADER_OVER = "leader over"
    "The sequence whose prompt is handed over has ended before it was. Others have not."
    ENDED = "ended"
    "An instance told the last end."
    CLOSED = "closed"
    "The router ends it: withdrawn, timed out, turned away, broken off."


class RequestAction(Enum):
    SEND = "send"
    "The whole request, to decode instance."
    EXPECT = "expect"
    PREFILL = "prefill"
    PASS_OFFER = "pass offer"
    PASS_ASK = "pass question"
    PASS_RELEASE = "pass release"
    DENY_RELEASE = "deny release"
    "Tell the decode instance that its copy is not to be trusted."
    FORGET_PREFILL = "forget prefill"
    FORGET_HOME = "forget home"
    COUNT_LOSS = "count loss"
    REQUEUE = "requeue"
    "Next attempt, old place in the queue."


S, F, A = RequestState, RequestFact, RequestAction
_BOTH: Final = (A.FORGET_PREFILL, A.FORGET_HOME)

NEXT: Final[dict[tuple[RequestState, RequestFact], tuple[RequestState, tuple[RequestAction, ...]]]] = {
    (S.QUEUED, F.PLACED_WHOLE): (S.SERVING, (A.SEND,)),
    (S.QUEUED, F.PLACED_PAIR): (S.RESERVING, (A.EXPECT,)),
    (S.QUEUED, F.CLOSED): (S.DONE, ()),
    (S.RESERVING, F.RESERVED): (S.PREFILLING, (A.PREFILL,)),
    (S.RESERVING, F.REFUSED): (S.QUEUED, (A.REQUEUE,)),
    (S.RESERVING, F.PREFILL_LOST): (S.QUEUED, (A.FORGET_HOME, A.REQUEUE)),  # nobody worked on it: no loss of this request
    (S.RESERVING, F.HOME_LOST): (S.QUEUED, (A.REQUEUE,)),
    (S.RESERVING, F.BROKEN): (S.QUEUED, (A.FORGET_HOME, A.REQUEUE)),
    (S.RESERVING, F.LEFT): (S.QUEUED, (A.FORGET_HOME, A.REQUEUE)),
    (S.RESERVING, F.LEADER_OVER): (S.QUEUED, (A.FORGET_HOME, A.REQUEUE)),
    (S.RESERVING, F.ENDED): (S.DONE, (A.FORGET_HOME,)),
    (S.RESERVING, F.CLOSED): (S.DONE, (A.FORGET_HOME,)),
    (S.PREFILLING, F.RESERVED): (S.PREFILLING, ()),  # the answer to a renewal
    (S.PREFILLING, F.REFUSED): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.PREFILLING, F.OFFERED): (S.PREFILLING, (A.PASS_OFFER,)),
    (S.PREFILLING, F.PREFILLED): (S.HANDING, (A.PASS_OFFER,)),
    (S.PREFILLING, F.ADOPTED): (S.SERVING, (A.FORGET_PREFILL,)),  # decode instance cannot copy: it computes all of it
    (S.PREFILLING, F.PREFILL_LOST): (S.QUEUED, (A.FORGET_HOME, A.COUNT_LOSS, A.REQUEUE)),
    (S.PREFILLING, F.HOME_LOST): (S.QUEUED, (A.FORGET_PREFILL, A.COUNT_LOSS, A.REQUEUE)),
    (S.PREFILLING, F.BROKEN): (S.QUEUED, (*_BOTH, A.COUNT_LOSS, A.REQUEUE)),
    (S.PREFILLING, F.LEFT): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.PREFILLING, F.LEADER_OVER): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.PREFILLING, F.ENDED): (S.DONE, _BOTH),
    (S.PREFILLING, F.CLOSED): (S.DONE, _BOTH),
    (S.HANDING, F.RESERVED): (S.HANDING, ()),  # the answer to a renewal
    (S.HANDING, F.REFUSED): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.HANDING, F.ASKED): (S.HANDING, (A.PASS_ASK,)),
    (S.HANDING, F.RELEASED): (S.HANDING, (A.PASS_RELEASE,)),
    (S.HANDING, F.ADOPTED): (S.SERVING, (A.FORGET_PREFILL,)),
    (S.HANDING, F.PREFILL_LOST): (S.HANDING, (A.DENY_RELEASE,)),  # decode instance has the first token, and computes the rest
    (S.HANDING, F.HOME_LOST): (S.QUEUED, (A.FORGET_PREFILL, A.COUNT_LOSS, A.REQUEUE)),
    (S.HANDING, F.BROKEN): (S.QUEUED, (*_BOTH, A.COUNT_LOSS, A.REQUEUE)),
    (S.HANDING, F.LEFT): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.HANDING, F.LEADER_OVER): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.HANDING, F.ENDED): (S.DONE, _BOTH),
    (S.HANDING, F.CLOSED): (S.DONE, _BOTH),
    (S.SERVING, F.REFUSED): (S.QUEUED, (A.REQUEUE,)),
    (S.SERVING, F.HOME_LOST): (S.QUEUED, (A.COUNT_LOSS, A.REQUEUE)),
    (S.SERVING, F.BROKEN): (S.QUEUED, (A.FORGET_HOME, A.COUNT_LOSS, A.REQUEUE)),
    (S.SERVING, F.LEFT): (S.QUEUED, (A.FORGET_HOME, A.REQUEUE)),
    (S.SERVING, F.ENDED): (S.DONE, ()),
    (S.SERVING, F.CLOSED): (S.DONE, (A.FORGET_HOME,)),
}

HANDED_OFF: Final = (S.RESERVING, S.PREFILLING, S.HANDING)
"""A hand-off is under way."""

OUTCOMES: Final[dict[RequestFact, str]] = {
    F.ADOPTED: "adopted",
    F.REFUSED: "refused",
    F.PREFILL_LOST: "prefill_lost",
    F.HOME_LOST: "decode_lost",
    F.BROKEN: "broken",
    F.LEFT: "left",
    F.LEADER_OVER: "ended",
    F.ENDED: "ended",
    F.CLOSED: "closed",
}
"""Facts that end a hand-off, as metrics name them. One that decode adopts before all is computed is `not_copied`."""

TOLD: Final = (F.RESERVED, F.REFUSED, F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)
"""Facts that an instance tells in so many words. One that is repeated, or comes when it means nothing, changes nothing."""

LATE: Final[frozenset[tuple[RequestState, RequestFact]]] = frozenset(
    {
        *((S.RESERVING, fact) for fact in (F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)),
        *((S.PREFILLING, fact) for fact in (F.ASKED, F.RELEASED)),
        *((S.HANDING, fact) for fact in (F.OFFERED, F.PREFILLED)),
        *((S.SERVING, fact) for fact in (F.RESERVED, F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)),
    }
)
"""Counted, and nothing else."""


def draw() -> str:
    """The table as a mermaid state diagram: one arrow for each pair of states, with the facts that lead along it."""
    arrows: dict[tuple[RequestState, RequestState], list[str]] = {}
    for (state, fact), (after, _) in NEXT.items():
        if after is not state:
            arrows.setdefault((state, after), []).append(fact.value)
    lines = ["stateDiagram-v2", f"    [*] --> {S.QUEUED.name}"]
    for (state, after), facts in arrows.items():
        lines.append(f"    {state.name} --> {after.name}: {', '.join(facts)}")
    return "\n".join([*lines, f"    {S.DONE.name} --> [*]"])
