"""Block moves between tiers: core and kvcache share BlockMove and MoveResult and nothing else.

A move has two phases. Prepare pins both ends and makes a BlockMove; complete takes the MoveResult and makes the target
visible, or leaves everything as if the move had never begun.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.protocol.ids import BlockId, BlockKey, Generation, MoveId, StepNo

Tier = Literal["device", "host", "storage"]


class MovedBlock(Struct, frozen=True, array_like=True):
    """One block of a move. A generation that differs from the pool's now means that the block was reused: do not touch."""

    key: BlockKey
    source: BlockId
    source_generation: Generation
    target: BlockId
    target_generation: Generation


class BlockMove(Struct, frozen=True, array_like=True):
    """Copy these blocks, in this order: a leading run of them is useful even if the rest fails."""

    id: MoveId
    source: Tier
    target: Tier
    blocks: tuple[MovedBlock, ...]
    after_step: StepNo
    "Begin only when this step has been executed: an earlier plan may still write to a target block's last owner."


class MoveResult(Struct, frozen=True, array_like=True):
    """Exactly one a move. `moved` counts the leading blocks that arrived whole."""

    id: MoveId
    moved: int
    error: str | None = None
