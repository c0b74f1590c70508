"""Excluded tokens of one step, as arrays for executors on a device. Rows: the due sequences.

bans    min_tokens and bad words of several tokens. The last token may be FEEDBACK, unknown on the host: then a ban names the
        last token that activates it (sampling_state.SequenceSampling.bans)
masks   a bit per allowed token (token_masks.py), for structured output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int32s, Int64s
from baton.worker.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class Bans:
    ends: Int32s
    "[rows + 1]: the bans of a row are pairs[ends[row] : ends[row + 1]]."
    pairs: Int32s
    "[bans, 2]: (the last token that activates it or sampling_state.ANY, token)."


def bans_of(sampling: SamplingBatch, places: Int64s) -> Bans | None:
    """The bans of a step. places: batch indices of the due sequences. None: there are no bans."""
    if not sampling.excludes:
        return None
    slots, outputs, states = sampling.slots.tolist(), sampling.sequences.outputs, sampling.states
    return bans_from(
        [states[place].bans(outputs(slots[place])) if states[place].excluded else None for place in places.tolist()]
    )


def bans_from(pairs: Sequence[Int32s | None]) -> Bans | None:
    """The bans of these rows. pairs: per row. None: there are no bans."""
    ends = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum([0 if part is None else len(part) for part in pairs], out=ends[1:])
    return Bans(ends, np.concatenate([part for part in pairs if part is not None])) if ends[-1] else None


def grammar_masks(sampling: SamplingBatch, places: Int64s, vocabulary: int) -> dict[int, NDArray[np.uint32]]:
    """Masks of grammars by batch index; waits for them. A failed grammar allows nothing, so its row fails."""
    masks: dict[int, NDArray[np.uint32]] = {}
    wanted = set(places.tolist()) if sampling.constrained else ()
    for place, grammar in sampling.constrained:
        if place in wanted:
            masks[place] = grammar.mask_of(vocabulary)
    return masks


def forced_masks(sampling: SamplingBatch, places: Int64s, vocabulary: int) -> dict[int, NDArray[np.uint32]]:
    """Masks with a single token by batch index, for sequences without a choice (thought.py)."""
    masks: dict[int, NDArray[np.uint32]] = {}
    if not sampling.forces:
        return masks
    for place in places.tolist():
        state = sampling.states[place]
        if state.thought is None:
            continue
        token = state.forced(sampling.sequences.outputs(int(sampling.slots[place])))
        if token is not None:
            masks[place] = only(token, vocabulary)
    return masks


def only(token: int, vocabulary: int) -> NDArray[np.uint32]:
    """The mask that allows one token."""
    bits = np.zeros(-(-vocabulary // 32), np.uint32)
    bits[token // 32] = np.uint32(1 << (token % 32))
    return bits
