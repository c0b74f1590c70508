"""Absorb the result of one step: tokens go to their sequences, computed blocks to the cache, acknowledged slots are freed.

The pipeline has checked the rows against the plan: each row belongs to the slot's present occupant and answers what was
planned.
"""

from __future__ import annotations

from itertools import islice

from baton.core.engine.board import Board
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.protocol.ids import Slot
from baton.protocol.request import FinishReason
from baton.protocol.step import RowLogprobs, Rows, StepResult


def absorb(board: Board, chunks: dict[Slot, int], rows: Rows, result: StepResult) -> None:
    """Absorb a result. `rows`: its rows, grouped by meaning. `chunks`: tokens that a slot computed in this step, if not one."""
    drafted: dict[Slot, list[RowLogprobs]] = {slot: [] for slot, *_ in rows.drafted}
    for logprobs in result.logprobs:  # before the tokens, which may end their sequence
        sequence = board.slots.occupant_of(logprobs.slot, logprobs.incarnation)
        if sequence is not None and sequence.phase is not Phase.CLOSING:
            if logprobs.slot in drafted:
                drafted[logprobs.slot].append(logprobs)
            else:
                board.out.logprobs.append((sequence.request.id, sequence.index, logprobs))
    # Failures first: a failed row computed nothing that may be published.
    for failure in result.failures:
        sequence = board.slots.occupant_of(failure.slot, failure.incarnation)
        if sequence is not None and sequence.phase is not Phase.CLOSING:
            board.end(sequence, FinishReason.ERROR, failure.error, failure.reason)
    for slot in rows.chunks:
        sequence = board.slots.slot_owner(slot)
        if sequence.blocks:
            _confirm(board, sequence, chunks.get(slot, 1))
    _absorb_tokens(board, chunks, rows)
    for slot, tokens, planned, verified in rows.drafted:
        sequence = board.slots.slot_owner(slot)
        sequence.drafted_tokens += verified
        _absorb_drafted(board, sequence, tokens, planned, drafted[slot])
    if result.drafted:
        board.stats.drafted(result)
    for slot in rows.acks:
        board.acknowledge(board.slots.slot_owner(slot))


def _absorb_tokens(board: Board, chunks: dict[Slot, int], rows: Rows) -> None:
    """Append one token per row. Hot: no call per row except appends."""
    slot_owners, slot_owner, size = board.slots.slot_owners, board.slots.slot_owner, board.block_size
    emit, closing, taken = board.out.tokens.append, Phase.CLOSING, 0
    for slot, token in rows.sampled:
        sequence = slot_owners[slot] or slot_owner(slot)  # raises: the slot is empty
        sequence.in_flight -= 1
        if sequence.phase is closing:
            continue  # the sequence ended while this token was in flight; the client has its last token
        tokens = sequence.tokens
        tokens.append(token)
        taken += 1
        if sequence.blocks:  # otherwise it was preempted meanwhile: the token counts, its KV is lost
            computed = sequence.computed + (chunks.get(slot, 1) if chunks else 1)
            sequence.computed = computed
            if computed >= (sequence.published + 1) * size:
                publish(board, sequence)
        length = len(tokens)
        position = length - sequence.prompt_tokens - 1
        emit((sequence.request.id, sequence.attempt, sequence.index, position, token))
        if not position:
            board.out.begin(sequence, board.now)
        if token in sequence.stop_ids and length >= sequence.min_length:
            board.end(sequence, FinishReason.STOP)
        elif length >= sequence.check_length and (reason := sequence.check_end()) is not None:
            board.end(sequence, reason)
        elif sequence.leads:
            sequence.leads = False
            board.release_siblings(sequence.group)
    board.stats.output_tokens += taken


def _absorb_drafted(
    board: Board, sequence: Sequence, tokens: tuple[int, ...], planned: int, logprobs: list[RowLogprobs]
) -> None:
    """Append the accepted drafts and the token after them, up to the end of the sequence. `planned`: drafts that the step had
    room for. KV of the others is not counted as computed: the next step overwrites it."""
    sequence.in_flight -= 1
    sequence.drafts -= planned
    if sequence.phase is Phase.CLOSING:
        return
    position, reason, count = sequence.outputs, None, 0
    for token in tokens:
        sequence.tokens.append(token)
        count += 1
        if (reason := sequence.finish) is not None:
            break
    sequence.accepted_tokens += min(count, len(tokens) - 1)
    if sequence.blocks:
        sequence.computed += count
        sequence.scheduled -= 1 + planned - count
        if sequence.computed >= (sequence.published + 1) * board.block_size:
            publish(board, sequence)
    name = sequence.request.id, sequence.attempt, sequence.index, position
    board.out.tokens.append((*name, tokens[0] if count == 1 else list(tokens[:count])))
    board.out.logprobs += [(sequence.request.id, sequence.index, row) for row in islice(logprobs, count)]
    board.stats.output_tokens += count
    if reason is not None:
        board.end(sequence, reason)


def _confirm(board: Board, sequence: Sequence, count: int) -> None:
    """Count a chunk in the middle of a prompt as computed."""
    sequence.computed += count
    publish(board, sequence)


def publish(board: Board, sequence: Sequence) -> None:
    """Offer the sequence's newly completed blocks to the cache. Only computed tokens count, only while it owns its blocks.

    Where another sequence published the same content first, this one is folded onto that block: its table names the first block
    from the next plan on, and its own copy is released.
    """
    tiers, blocks, keys = board.tiers, sequence.blocks, sequence.keys
    full = sequence.computed // board.block_size
    board.hasher.extend(keys, sequence.root, sequence.tokens, full, sequence.request.extras)
    for place in range(sequence.published, full):
        if not board.publish(sequence, place):
            board.folds.append((sequence, sequence.incarnation, place, blocks[place]))
            board.stats.folded_blocks += 1
        elif tiers.up:
            prompt = (place + 1) * board.block_size <= sequence.prompt_tokens
            tiers.writes.published(keys[place], blocks[place], prompt=prompt)
    sequence.published = full
