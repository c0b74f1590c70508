"""The states of a routed request, as data. The picture in docs/internals/handoff.md is drawn from it.

QUEUED      at the router; no instance has it                     -> placed: RESERVING (a pair) or SERVING (one instance)
RESERVING   decode was asked to reserve blocks                    -> PREFILLING when it has
PREFILLING  prefill computes the prompt, decode pulls behind it   -> HANDING when all is computed
HANDING     decode copies the rest, and asks for the release      -> SERVING when it continues by itself
SERVING     one instance has it for good                          -> DONE at its last end
DONE        all ends are delivered, no instance has anything of it

`decoder` is the instance that answers the request: decode of a pair, or the one that does it all. `NEXT` is the program: the
coordinator (core/cluster/coordinator.py) performs its actions. A pair that is neither there nor in `LATE` cannot happen.
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
    """Facts that change the state. The coordinator accepts a fact of an instance only for the present attempt, and only from
    the instance that may report it."""

    PLACED_WHOLE = "placed whole"
    PLACED_PAIR = "placed on a pair"
    RESERVED = "reserved"
    "The decode instance has reserved blocks."
    REFUSED = "refused"
    "The decode or prefill instance refuses the request."
    OFFERED = "offered"
    "A part of the prompt is computed."
    PREFILLED = "prefilled"
    "The whole prompt is computed."
    ASKED = "release asked"
    RELEASED = "released"
    ADOPTED = "adopted"
    "The decode instance continues by itself, with its present blocks."
    PREFILL_LOST = "prefill lost"
    DECODER_LOST = "decoder lost"
    BROKEN = "broken"
    "An instance fails the request: no answer in time, a missing token, an end without a reason."
    LEFT = "instance leaves"
    "The instance was stopped, and its time to finish has run out. Not a fault: the request's losses do not count it."
    LEADER_OVER = "leader over"
    "The sequence whose prompt is handed over has ended early. Its siblings have not."
    ENDED = "ended"
    "An instance reported the last end."
    CLOSED = "closed"
    "The router ends the request: withdrawn, timed out, rejected, failed."


class RequestAction(Enum):
    SEND = "send"
    "Send the whole request to the decode instance."
    EXPECT = "expect"
    PREFILL = "prefill"
    PASS_OFFER = "pass offer"
    PASS_ASK = "pass question"
    PASS_RELEASE = "pass release"
    DENY_RELEASE = "deny release"
    "Report to the decode instance that its copy is invalid."
    FORGET_PREFILL = "forget prefill"
    FORGET_DECODER = "forget decoder"
    COUNT_LOSS = "count loss"
    REQUEUE = "requeue"
    "Return to the old place in the queue, with the next attempt."


S, F, A = RequestState, RequestFact, RequestAction
_BOTH: Final = (A.FORGET_PREFILL, A.FORGET_DECODER)

NEXT: Final[dict[tuple[RequestState, RequestFact], tuple[RequestState, tuple[RequestAction, ...]]]] = {
    (S.QUEUED, F.PLACED_WHOLE): (S.SERVING, (A.SEND,)),
    (S.QUEUED, F.PLACED_PAIR): (S.RESERVING, (A.EXPECT,)),
    (S.QUEUED, F.CLOSED): (S.DONE, ()),
    (S.RESERVING, F.RESERVED): (S.PREFILLING, (A.PREFILL,)),
    (S.RESERVING, F.REFUSED): (S.QUEUED, (A.REQUEUE,)),
    # no instance worked on the request: not counted as a loss
    (S.RESERVING, F.PREFILL_LOST): (S.QUEUED, (A.FORGET_DECODER, A.REQUEUE)),
    (S.RESERVING, F.DECODER_LOST): (S.QUEUED, (A.REQUEUE,)),
    (S.RESERVING, F.BROKEN): (S.QUEUED, (A.FORGET_DECODER, A.REQUEUE)),
    (S.RESERVING, F.LEFT): (S.QUEUED, (A.FORGET_DECODER, A.REQUEUE)),
    (S.RESERVING, F.LEADER_OVER): (S.QUEUED, (A.FORGET_DECODER, A.REQUEUE)),
    (S.RESERVING, F.ENDED): (S.DONE, (A.FORGET_DECODER,)),
    (S.RESERVING, F.CLOSED): (S.DONE, (A.FORGET_DECODER,)),
    (S.PREFILLING, F.RESERVED): (S.PREFILLING, ()),  # the answer to a renewal
    (S.PREFILLING, F.REFUSED): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.PREFILLING, F.OFFERED): (S.PREFILLING, (A.PASS_OFFER,)),
    (S.PREFILLING, F.PREFILLED): (S.HANDING, (A.PASS_OFFER,)),
    # the decode instance cannot copy, so it computes the whole prompt
    (S.PREFILLING, F.ADOPTED): (S.SERVING, (A.FORGET_PREFILL,)),
    (S.PREFILLING, F.PREFILL_LOST): (S.QUEUED, (A.FORGET_DECODER, A.COUNT_LOSS, A.REQUEUE)),
    (S.PREFILLING, F.DECODER_LOST): (S.QUEUED, (A.FORGET_PREFILL, A.COUNT_LOSS, A.REQUEUE)),
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
    (S.HANDING, F.PREFILL_LOST): (S.HANDING, (A.DENY_RELEASE,)),  # decode has the first token, and computes the rest
    (S.HANDING, F.DECODER_LOST): (S.QUEUED, (A.FORGET_PREFILL, A.COUNT_LOSS, A.REQUEUE)),
    (S.HANDING, F.BROKEN): (S.QUEUED, (*_BOTH, A.COUNT_LOSS, A.REQUEUE)),
    (S.HANDING, F.LEFT): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.HANDING, F.LEADER_OVER): (S.QUEUED, (*_BOTH, A.REQUEUE)),
    (S.HANDING, F.ENDED): (S.DONE, _BOTH),
    (S.HANDING, F.CLOSED): (S.DONE, _BOTH),
    (S.SERVING, F.REFUSED): (S.QUEUED, (A.REQUEUE,)),
    (S.SERVING, F.DECODER_LOST): (S.QUEUED, (A.COUNT_LOSS, A.REQUEUE)),
    (S.SERVING, F.BROKEN): (S.QUEUED, (A.FORGET_DECODER, A.COUNT_LOSS, A.REQUEUE)),
    (S.SERVING, F.LEFT): (S.QUEUED, (A.FORGET_DECODER, A.REQUEUE)),
    (S.SERVING, F.ENDED): (S.DONE, ()),
    (S.SERVING, F.CLOSED): (S.DONE, (A.FORGET_DECODER,)),
}

HANDED_OFF: Final = (S.RESERVING, S.PREFILLING, S.HANDING)
"""States in which a hand-off is under way."""

OUTCOMES: Final[dict[RequestFact, str]] = {
    F.ADOPTED: "adopted",
    F.REFUSED: "refused",
    F.PREFILL_LOST: "prefill_lost",
    F.DECODER_LOST: "decode_lost",
    F.BROKEN: "broken",
    F.LEFT: "left",
    F.LEADER_OVER: "ended",
    F.ENDED: "ended",
    F.CLOSED: "closed",
}
"""Facts that end a hand-off, as metrics name them. An adoption before all is computed is `not_copied`."""

REPORTED: Final = (F.RESERVED, F.REFUSED, F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)
"""Facts that an instance reports by a message of their own. Repeated ones, and ones that come too late, change nothing."""

LATE: Final[frozenset[tuple[RequestState, RequestFact]]] = frozenset(
    {
        *((S.RESERVING, fact) for fact in (F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)),
        *((S.PREFILLING, fact) for fact in (F.ASKED, F.RELEASED)),
        *((S.HANDING, fact) for fact in (F.OFFERED, F.PREFILLED)),
        *((S.SERVING, fact) for fact in (F.RESERVED, F.OFFERED, F.PREFILLED, F.ASKED, F.RELEASED, F.ADOPTED)),
    }
)
"""Pairs that are counted and otherwise ignored."""


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
