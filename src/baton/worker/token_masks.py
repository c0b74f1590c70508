"""Which tokens some rows of a step may take: what structured output sends, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int64s


@dataclass(frozen=True, slots=True)
class Masks:
    rows: Int64s
    "[masks] whose. A row that is not here may take any."
    bits: NDArray[np.uint32]
    "[masks, ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32, set where it is allowed."


def masks_of(masks: Mapping[int, NDArray[np.uint32]], places: Int64s) -> Masks | None:
    """masks: by place of the batch."""
    rows = [row for row, place in enumerate(places.tolist()) if place in masks]
    if not rows:
        return None
    return Masks(np.array(rows), np.stack([masks[int(places[row])] for row in rows]))
