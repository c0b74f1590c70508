"""Sums and gathers of tensors over the ranks of a set: the part of a decoder that ranks do together."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.models.config import ModelConfig


@runtime_checkable
class TensorCollective(Protocol):
    def sum(self, rows: Tensor) -> None:
        """Replaces dense rows by their sums over ranks, which have the same bits on every rank."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Gathers the parts of all ranks, which have one shape: [ranks, *shape of the part]."""
        ...


def gather_logits(config: ModelConfig, collective: TensorCollective, part: Tensor) -> Tensor:
    """Gathers logits: [rows, vocabulary] from the ranks' parts, [rows, tokens of the rank]. The parts differ in width by one
    unit at most."""
    shares = config.all_head_rows
    widest = max(len(share) for share in shares)
    padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
    parts = collective.gather(padded)
    return torch.cat([parts[rank, :, : len(share)] for rank, share in enumerate(shares)], 1)
