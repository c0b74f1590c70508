"""Masks of allowed tokens for some rows of a step, for structured output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int64s


@dataclass(frozen=True, slots=True)
class Masks:
    rows: Int64s
    "[masks] row of each mask. Other rows may take any token."
    bits: NDArray[np.uint32]
    "[masks, ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32, set if allowed."


def masks_of(masks: Mapping[int, NDArray[np.uint32]], places: Int64s) -> Masks | None:
    """The masks of some rows of a step. masks: by batch index."""
    rows = [row for row, place in enumerate(places.tolist()) if place in masks] if masks else []
    if not rows:
        return None
    return Masks(np.array(rows), np.stack([masks[int(places[row])] for row in rows]))
