"""The whole instance, proved from scratch. Numbers are those of docs/reliability.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.engine.request import ON_WORKER, OPEN, Phase
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId

if TYPE_CHECKING:
    from baton.core.engine.instance import Instance


def check(instance: Instance) -> None:
    scheduler = instance.scheduler
    held: dict[BlockId, int] = {}
    for sequence in scheduler.running:
        for block in sequence.blocks:
            held[block] = held.get(block, 0) + 1
    scheduler.cache.pool.check(held)
    scheduler.cache.check()
    _check_seats(instance)
    _check_tables(instance)
    _check_queue(instance)


def _check_seats(instance: Instance) -> None:
    """25: each sequence is in exactly one place. 30: no more on the worker than it has slots, all pending states counted."""
    scheduler = instance.scheduler
    seated = [sequence for sequence in scheduler.seats.occupants if sequence is not None]
    if len(seated) != scheduler.seats.taken:
        raise InvariantBroken(f"{len(seated)} sequences in {scheduler.seats.taken} taken slots", invariant=30)
    for slot, sequence in enumerate(scheduler.seats.occupants):
        if sequence is None:
            continue
        if sequence.slot != slot or sequence.incarnation != scheduler.seats.incarnations[slot]:
            raise InvariantBroken(f"{sequence!r} sits in slot {slot} and thinks otherwise", invariant=25)
        if sequence.phase not in (*ON_WORKER, Phase.PREEMPTING, Phase.CLOSING):
            raise InvariantBroken(f"{sequence!r} sits in a slot", invariant=25)
    working = sorted((s for s in seated if s.phase in ON_WORKER), key=lambda s: s.order)
    if working != scheduler.running:
        raise InvariantBroken("running is not what sits on the worker, most urgent first", invariant=25)
    if sum(s.phase is Phase.DECODE for s in working) != scheduler.decoding:
        raise InvariantBroken(f"{scheduler.decoding} sequences are counted as decoding", invariant=30)


def _check_tables(instance: Instance) -> None:
    """6: no hole, no duplicate, long enough. 30: computed <= planned <= known and in flight. 4: nothing shared is written."""
    scheduler = instance.scheduler
    pool, size = scheduler.cache.pool, scheduler.block_size
    for sequence in scheduler.running:
        known, blocks = len(sequence.tokens), sequence.blocks
        if len(dict.fromkeys(blocks)) != len(blocks) or sequence.capacity != len(blocks) * size:
            raise InvariantBroken(f"{sequence!r}: a block twice in its table, or a wrong capacity", invariant=6)
        if sequence.scheduled > sequence.capacity or sequence.capacity - size >= max(sequence.scheduled, sequence.target):
            raise InvariantBroken(f"{sequence!r}: {len(blocks)} blocks for {sequence.scheduled} tokens", invariant=6)
        if not sequence.computed <= sequence.scheduled <= known + sequence.in_flight:
            raise InvariantBroken(f"{sequence!r}: {sequence.scheduled} tokens planned", invariant=30)
        if sequence.phase is Phase.DECODE and sequence.scheduled != known + sequence.in_flight - 1:
            raise InvariantBroken(f"{sequence!r}: {sequence.in_flight} in flight", invariant=31)
        for block in blocks[sequence.computed // size :]:
            if pool.request_references(block) != 1 or pool.is_cached(block):
                raise InvariantBroken(f"{sequence!r}: block {block} is shared and will be written", invariant=4)


def _check_queue(instance: Instance) -> None:
    """25 for those that wait, and the counters of the queue (49)."""
    scheduler = instance.scheduler
    open_sequences = [s for group in instance.groups.values() for s in group.sequences if s.phase in OPEN]
    waiting = [s for s in open_sequences if s.phase is Phase.WAITING]
    if len(waiting) != len(scheduler.waiting):
        raise InvariantBroken(f"{len(waiting)} wait, the line counts {len(scheduler.waiting)}", invariant=25)
    if sum(not s.queued for s in waiting) != scheduler.waiting.returned:
        raise InvariantBroken(f"{scheduler.waiting.returned} are counted as back in line", invariant=25)
    for sequence in waiting:
        if sequence.blocks or sequence.slot >= 0 or sequence.in_flight:
            raise InvariantBroken(f"{sequence!r} waits and holds something", invariant=25)
    queued = [s for s in open_sequences if s.queued]
    if (len(queued), sum(s.prompt_tokens for s in queued)) != (scheduler.queued, scheduler.queued_tokens):
        raise InvariantBroken(f"{len(queued)} queued, {scheduler.queued} counted", invariant=49)
    limits = instance.config.queue
    if scheduler.queued > limits.requests_max or scheduler.queued_tokens > limits.tokens_max:
        raise InvariantBroken("more is queued than the queue may hold", invariant=49)
    if len(instance.in_flight) > instance.config.scheduler.steps_in_flight:
        raise InvariantBroken(f"{len(instance.in_flight)} plans in flight", invariant=49)
