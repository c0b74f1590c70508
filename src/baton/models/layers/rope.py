"""Rotary positions: dimension i of a head and dimension i + head_dim/2 turn together, by position * frequency(i).

`Rope.angles` is asked once a step, `rotate` once a layer. There is no table of all positions here: working out the angles of
a step is a rounding error of its cost. The numbers are those of every other platform (models/rotary.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.config import RopeConfig
from baton.models.rotary import rotary_angles, rotary_frequencies


class Angles(NamedTuple):
    """Of one step's tokens, each [tokens, 1, head_dim]; the middle dimension spreads over the heads."""

    cos: Tensor
    signed_sin: Tensor
    "-sin in the first half, +sin in the second: what the swapped halves are multiplied by."


class Rope:
    __slots__ = ("attention_factor", "device", "frequencies")

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.frequencies, self.attention_factor = rotary_frequencies(config, head_dim)
        self.device = device

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """positions: [tokens]. The angles are float32, whatever the model computes in."""
        cos, sin = (
            torch.from_numpy(numbers).to(self.device, dtype)[:, None]
            for numbers in rotary_angles(self.frequencies, self.attention_factor, positions.cpu().numpy())
        )
        return Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """heads: [tokens, any number of heads, head_dim]. Rolling by half the width swaps the two halves."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * angles.cos).addcmul_(swapped, angles.signed_sin)
