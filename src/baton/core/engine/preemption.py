"""Preemption, exactly as docs/architecture.md section 5.

1. The victim is the tail of `running`: the least urgent, then the youngest. The oldest of the most urgent class is never it.
2. `preempt`: PREEMPTING, blocks given up, slot still taken, drop to be told. Tokens in flight are appended as they come.
3. The worker answers the drop within that step, after the slot's last token, even if the batch is empty.
4. `acknowledge`: only now WAITING, at its old place in line. What to prefill is frozen at admission: prompt + every output.
5. An end while PREEMPTING (a stop token in flight, an abort) makes it CLOSING; the drop that was told serves for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from baton.core.engine.request import Fact, Phase, Sequence
from baton.errors import InvariantBroken
from baton.protocol.request import FinishReason
from baton.protocol.step import StepPlan

if TYPE_CHECKING:
    from baton.core.engine.scheduler import Draft, Scheduler

CRASHES_MAX: Final = 2
"""Worker losses at the same place after which a sequence is given up."""


def preempt(scheduler: Scheduler, victim: Sequence) -> None:
    """Its blocks are available at once: the plan that hands them on also drops it, after every plan that writes to them."""
    was = victim.phase
    victim.advance(Fact.PREEMPTED)
    victim.preemptions += 1
    scheduler.stats.preemptions += 1
    scheduler.reserve.recover()
    scheduler.preempting.append(victim)
    leave_worker(scheduler, victim, was)


def leave_worker(scheduler: Scheduler, sequence: Sequence, was: Phase) -> None:
    """Out of `running`, blocks back, drop told. The slot stays taken until the drop is acknowledged."""
    running = scheduler.running
    if running[-1] is sequence:
        running.pop()
    else:
        running.remove(sequence)
    if was is Phase.DECODE:
        scheduler.decoding -= 1
    scheduler.cache.release(sequence.lose_blocks())
    scheduler.drops.append((sequence.slot, sequence.incarnation))


def acknowledge(scheduler: Scheduler, sequence: Sequence) -> None:
    """The worker has executed the drop: nothing of this incarnation is in flight any more."""
    sequence.advance(Fact.ACKNOWLEDGED)
    scheduler.seats.vacate(sequence)
    if sequence.phase is Phase.WAITING:
        if sequence.in_flight:
            raise InvariantBroken(f"{sequence!r}: dropped with {sequence.in_flight} tokens in flight", invariant=32)
        scheduler.preempting.remove(sequence)
        scheduler.waiting.join(sequence)


def make_way(scheduler: Scheduler, draft: Draft) -> None:
    """Preempt strictly less urgent sequences for the head of the line, if that is what keeps it out and if it is enough.

    Equal urgency never makes way, so two of a class cannot push each other out in turn.
    """
    running, head = scheduler.running, scheduler.waiting.head()
    if head is None or not running or running[-1].priority <= head.priority:
        return
    shortage = scheduler.shortage(head, draft)
    if shortage is None:
        return
    if shortage.reason == "slots" and scheduler.seats.taken == len(running):  # else one is on its way already
        preempt(scheduler, running[-1])
        draft.preempted = True
    elif shortage.reason == "blocks":
        enough = scheduler.cache.available + shortage.short_by
        lesser = [sequence for sequence in running if sequence.priority > head.priority]
        if sum(len(sequence.blocks) for sequence in lesser) < shortage.short_by:
            return
        while lesser and scheduler.cache.available < enough:
            preempt(scheduler, lesser.pop())
        draft.preempted = True


def worker_lost(scheduler: Scheduler, in_flight: Iterable[StepPlan]) -> None:
    """Every occupant leaves its slot without an acknowledgement: there is nobody left to give one.

    Those in a plan without a result are suspects (limits.OneSuspect) until they are past the furthest place that the dead
    worker can have reached. One that is lost twice on the way there is given up: it must not take a third worker with it.
    """
    suspects = dict.fromkeys(slot for plan in in_flight for slot in plan.run.slots)
    for slot, sequence in enumerate(scheduler.seats.occupants):
        if sequence is None:
            continue
        if slot in suspects and sequence.phase is not Phase.CLOSING:
            sequence.crashes += 1  # absorb.py clears it once the sequence is past the place
            sequence.crash_length = len(sequence.tokens) + sequence.in_flight
        sequence.advance(Fact.WORKER_LOST)
        scheduler.cache.release(sequence.lose_blocks())
        sequence.in_flight = 0
        scheduler.seats.vacate(sequence)
        if sequence.phase is Phase.WAITING:
            scheduler.waiting.join(sequence)
            if sequence.crashes >= CRASHES_MAX:
                scheduler.stats.crash_ends += 1
                scheduler.end(sequence, FinishReason.ERROR, "the worker was lost twice while computing this request")
    scheduler.running.clear()
    scheduler.preempting.clear()
    scheduler.drops.clear()
    scheduler.folds.clear()
    scheduler.decoding = 0
