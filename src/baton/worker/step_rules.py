"""Which tokens may not come next in one step, as arrays for what computes on a device. Rows: the sequences that are due.

bans    min_tokens and bad words of several tokens. The last token may be FEEDBACK, unknown here: then a ban says which token
        that must be to make it count (sampling_state.SequenceSampling.bans)
masks   a bit for every token that is allowed (token_masks.py): what structured output sends
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int32s, Int64s
from baton.worker.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class Bans:
    ends: Int32s
    "[rows + 1]: those of a row are pairs[ends[row] : ends[row + 1]]."
    pairs: Int32s
    "[bans, 2]: (the last token that makes it count or sampling_state.ANY, token)."


def bans_of(sampling: SamplingBatch, places: Int64s) -> Bans | None:
    """places: of the sequences that are due. None: nobody has any."""
    if not sampling.excludes:
        return None
    slots, outputs, states = sampling.slots.tolist(), sampling.sequences.outputs, sampling.states
    pairs = [states[place].bans(outputs(slots[place])) if states[place].excluded else NONE for place in places.tolist()]
    ends = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum([len(part) for part in pairs], out=ends[1:])
    return Bans(ends, np.concatenate(pairs)) if ends[-1] else None


def grammar_masks(sampling: SamplingBatch, places: Int64s, vocabulary: int) -> dict[int, NDArray[np.uint32]]:
    """By place of the batch: what grammars allow. Waits for them. One that has failed allows nothing, so its row fails."""
    wanted, masks = set(places.tolist()), dict[int, NDArray[np.uint32]]()
    for place, grammar in sampling.constrained:
        if place in wanted:
            masks[place] = grammar.mask_of(vocabulary)
    return masks


def forced_masks(sampling: SamplingBatch, places: Int64s, vocabulary: int) -> dict[int, NDArray[np.uint32]]:
    """By place of the batch: masks with a single token, of those who have no choice (thought.py)."""
    masks: dict[int, NDArray[np.uint32]] = {}
    for place in places.tolist():
        state = sampling.states[place]
        if state.thought is None:
            continue
        token = state.forced(sampling.sequences.outputs(int(sampling.slots[place])))
        if token is not None:
            bits = masks[place] = np.zeros(-(-vocabulary // 32), np.uint32)
            bits[token // 32] = np.uint32(1 << (token % 32))
    return masks


NONE: Int32s = np.zeros((0, 2), np.int32)
