"""Rotary positions: dimensions i and i + head_dim/2 of a head rotate together, by position * frequency(i).

`Rope.angles` is called once per step, `rotate` once per layer. There is no table of all positions: the cost of a step's angles
is negligible. The numbers equal those of every other platform (models/rotary.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.config import RopeConfig
from baton.models.rotary import rotary_angles, rotary_frequencies


class Angles(NamedTuple):
    """Angles of one step's tokens, each [tokens, 1, head_dim]; the middle dimension broadcasts over the heads."""

    cos: Tensor
    signed_sin: Tensor
    "Sines, negative in the first half: the factor of the swapped halves."


class Rope:
    __slots__ = ("attention_factor", "device", "frequencies")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.frequencies, self.attention_factor = rotary_frequencies(config, head_dim)
        self.device = device

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Angles of these positions, [tokens]. They are float32, whatever the model's dtype."""
        cos, sin = (
            torch.from_numpy(numbers).to(self.device, dtype)[:, None]
            for numbers in rotary_angles(self.frequencies, self.attention_factor, positions.cpu().numpy())
        )
        return Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """The rotated heads, [tokens, any number of heads, head_dim]. Rolling by half the width swaps the two halves."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * angles.cos).addcmul_(swapped, angles.signed_sin)
