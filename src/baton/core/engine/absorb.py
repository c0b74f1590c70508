"""Takes one step's result in: tokens to their sequences, computed blocks to the cache, acknowledged slots back.

The instance has held the rows against the plan: each is about the slot's present occupant and means what was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.engine import preemption
from baton.core.engine.request import Phase, Sequence
from baton.core.kv.prefix_cache import NO_PARENT
from baton.protocol.ids import Slot
from baton.protocol.request import FinishReason
from baton.protocol.step import Rows, StepResult

if TYPE_CHECKING:
    from baton.core.engine.scheduler import Scheduler


def absorb(scheduler: Scheduler, chunks: dict[Slot, int], rows: Rows, result: StepResult) -> None:
    """`rows` are the result's, by meaning. `chunks` says how many tokens a slot computed in this step, where it is not one."""
    for logprobs in result.logprobs:  # before the tokens, which may end their sequence
        about = scheduler.seats.occupant(logprobs.slot, logprobs.incarnation)
        if about is not None and about.phase is not Phase.CLOSING:
            scheduler.out.logprobs.append((about.request.id, about.index, logprobs))
    # Failures first: a failed row computed nothing that may be published.
    for failure in result.failures:
        about = scheduler.seats.occupant(failure.slot, failure.incarnation)
        if about is not None and about.phase is not Phase.CLOSING:
            scheduler.end(about, FinishReason.ERROR, failure.reason)
    for slot in rows.chunks:
        sequence = scheduler.seats.sitting(slot)
        if sequence.blocks:
            _confirm(scheduler, sequence, chunks.get(slot, 1))
    _absorb_tokens(scheduler, chunks, rows)
    for slot in rows.acks:
        preemption.acknowledge(scheduler, scheduler.seats.sitting(slot))


def _absorb_tokens(scheduler: Scheduler, chunks: dict[Slot, int], rows: Rows) -> None:
    """One token for each row. Hot: kept flat."""
    sitting, size = scheduler.seats.sitting, scheduler.block_size
    emit, closing, taken = scheduler.out.tokens.append, Phase.CLOSING, 0
    for slot, token in rows.sampled:
        sequence = sitting(slot)
        sequence.in_flight -= 1
        if sequence.phase is closing:
            continue  # it ended while this token was in flight; the client has had its last
        tokens = sequence.tokens
        tokens.append(token)
        taken += 1
        if sequence.blocks:  # else it was preempted meanwhile: the token counts, the KV is gone
            computed = sequence.computed + (chunks.get(slot, 1) if chunks else 1)
            sequence.computed = computed
            if computed >= (sequence.published + 1) * size:
                publish(scheduler, sequence)
        emit((sequence.request.id, sequence.index, token))
        length = len(tokens)
        if token in sequence.stop_ids and length >= sequence.min_length:
            scheduler.end(sequence, FinishReason.STOP)
        elif length > sequence.stop_position:
            scheduler.end(sequence, FinishReason.LENGTH)
        elif length == sequence.prompt_tokens + 1 and len(sequence.group.sequences) > 1 and sequence.index == 0:
            scheduler.release_siblings(sequence.group)
        if sequence.crashes and length > sequence.crash_length:
            sequence.crashes = 0  # past the place where the worker was lost: no longer a suspect
    scheduler.stats.output_tokens += taken


def _confirm(scheduler: Scheduler, sequence: Sequence, count: int) -> None:
    """A chunk in the middle of a prompt is computed."""
    sequence.computed += count
    publish(scheduler, sequence)


def publish(scheduler: Scheduler, sequence: Sequence) -> None:
    """Offer its newly completed blocks to the cache. Only computed tokens count, only while it owns its blocks.

    Where another sequence published the same content first, this one is folded onto that block: its table names the first
    block from the next plan on, and its own copy is given back.
    """
    cache, blocks, keys = scheduler.cache, sequence.blocks, sequence.keys
    full = sequence.computed // scheduler.block_size
    scheduler.hasher.extend(keys, sequence.root, sequence.tokens, full)
    for place in range(sequence.published, full):
        own = blocks[place]
        first = cache.insert(keys[place], blocks[place - 1] if place else NO_PARENT, own)
        if first != own:
            cache.acquire(keys[place : place + 1])
            blocks[place] = first
            cache.release((own,))
            scheduler.folds.append((sequence, sequence.incarnation, place, first))
            scheduler.stats.folded_blocks += 1
    sequence.published = full
