"""What can keep the head of the line from being admitted. Admission asks a list, cheap questions first; a feature adds an
entry, not a branch.

A limit answers None, or a Shortage whose word is also the metric label. Running sequences are not asked: they were admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct

from baton.protocol.request import SamplingParams, sampling_bytes

if TYPE_CHECKING:
    from baton.core.engine.request import Sequence
    from baton.core.engine.scheduler import Draft, Scheduler

Reason = Literal["budget", "slots", "order", "suspect", "plan", "blocks"]

NEW_BYTES_MAX: Final = 1024 * 1024
"""New sequences of one plan, in bytes on the wire. More wait for the next plan; one alone may be larger."""


class Shortage(Struct, frozen=True):
    reason: Reason
    short_by: int


class Need(Struct, frozen=True):
    """The blocks that a sequence needs to be admitted, found without changing anything: one sent back holds nothing."""

    hit: int
    "Leading blocks that the cache has."
    hit_idle: int
    "How many of those are idle: taking them makes them unavailable to others."
    new: int


class Limit(Protocol):
    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None: ...


class TokenBudget:
    """Room in this step for at least one prompt token."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        return None if draft.prefill_left > 0 else Shortage("budget", 1)


class Slots:
    """A seat on the worker. One whose drop is not acknowledged is still taken."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        return None if scheduler.seats.free else Shortage("slots", 1)


class PlanBytes:
    """The new sequences of a step stay within what a plan may carry. One always goes."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        if not draft.new:
            return None
        over = draft.new_bytes + new_bytes(len(head.tokens), draft.new_settings(head)) - NEW_BYTES_MAX
        return Shortage("plan", over) if over > 0 else None


class Blocks:
    """The whole need at once, and the reserve for the growth of what runs."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        need = scheduler.need(head)
        wanted = need.new + need.hit_idle + draft.reserve(scheduler, head.priority)
        missing = wanted - scheduler.cache.available
        return Shortage("blocks", missing) if missing > 0 else None


class Order:
    """Nobody overtakes a more urgent sequence that was preempted and is not back in line yet."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        if any(sequence.order < head.order for sequence in scheduler.preempting):
            return Shortage("order", 1)
        return None


class OneSuspect:
    """Of those that were being computed when the worker was lost, one at a time: the next loss then names the culprit."""

    def short(self, head: Sequence, draft: Draft, scheduler: Scheduler) -> Shortage | None:
        if head.crashes and any(sequence.crashes for sequence in scheduler.running):
            return Shortage("suspect", 1)
        return None


def new_bytes(tokens: int, sampling: SamplingParams | None) -> int:
    """At most so many bytes of a plan tell of a new sequence. A block is never smaller than a token."""
    return 64 + 10 * tokens + (sampling_bytes(sampling) if sampling is not None else 0)


def default_limits() -> list[Limit]:
    return [TokenBudget(), Slots(), Order(), OneSuspect(), PlanBytes(), Blocks()]
