"""A step: one StepPlan out, one StepResult back. Scheduler and worker share these two values and nothing else.

A running sequence sits in a slot. The worker keeps, for each slot, the occupant's tokens and block table; a plan only
says what changes. Plans are executed in the order of their numbers, which is what makes it safe to hand a block on in
the very plan that takes it from its last owner: every earlier plan has been executed by then.

On the wire a row of a result is an int32 that a kernel can write. `read_rows` turns rows into typed columns here, at the
boundary; nothing above ever compares an int with a sentinel.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from baton.errors import ProtocolError
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.request import SamplingParams, TokenId

NO_TOKEN_ID: Final = -1
"""Row value: nothing this step, a prompt chunk that is not the last."""

PREEMPTED_TOKEN_ID: Final = -9
"""Row value: the worker has executed this slot's drop; nothing more of this incarnation follows."""


class NewSequence(Struct, frozen=True, array_like=True):
    """A sequence takes a slot: in full, once."""

    slot: Slot
    incarnation: Incarnation
    tokens: tuple[TokenId, ...]
    "Prompt and every output so far, frozen for this incarnation: exactly these are to be prefilled."
    prompt_tokens: int
    "How many of them are prompt. A draw's position is counted from here."
    computed_tokens: int
    "Leading tokens whose KV is already in the blocks; less than len(tokens)."
    blocks: tuple[BlockId, ...]
    sampling: SamplingParams
    index: int
    "Which of the n sequences of its request."


class Run(Struct, frozen=True, array_like=True):
    """The sequences that compute in this step, in columns: one object a step, not one a token.

    A sequence whose known tokens are all computed runs the token it sampled last; the worker has it, the scheduler
    may not have seen it yet.
    """

    slots: tuple[Slot, ...] = ()
    counts: tuple[int, ...] = ()


class StepPlan(Struct, frozen=True, array_like=True):
    """What the worker does next. Order: drops, then new sequences, then table changes, then the run."""

    step: StepNo
    epoch: WorkerEpoch
    drops: tuple[tuple[Slot, Incarnation], ...] = ()
    "Preempt, abort or end: forget the slot and answer PREEMPTED_TOKEN_ID in this very step, even if nothing runs."
    new: tuple[NewSequence, ...] = ()
    grown: tuple[tuple[Slot, BlockId], ...] = ()
    "Append the block to the slot's table."
    folded: tuple[tuple[Slot, int, BlockId], ...] = ()
    "Replace entry i of the slot's table by a block with the same content."
    run: Run = Run()

    @property
    def rows(self) -> tuple[Slot, ...]:
        """The slots that the result must answer for, in this order: what runs, then what is dropped."""
        return self.run.slots + tuple(slot for slot, _ in self.drops)

    @property
    def tokens(self) -> int:
        return sum(self.run.counts)


class RowFailure(Struct, frozen=True, array_like=True):
    """The worker cannot go on with this sequence (NaN logits, say); its neighbours are not touched."""

    slot: Slot
    incarnation: Incarnation
    reason: str


class TokenLogprob(Struct, frozen=True, array_like=True):
    """What the model thought of one token."""

    token: TokenId
    logprob: float
    rank: int
    "1 for the likeliest."
    top: tuple[tuple[TokenId, float], ...] = ()
    "The likeliest tokens, best first."


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities that a sequence asked for. The core hands them on and never looks inside."""

    slot: Slot
    incarnation: Incarnation
    sampled: TokenLogprob | None = None
    prompt_from: int = 0
    "Position of the first of `prompt`. A prompt computed twice is reported twice; the receiver keeps one."
    prompt: tuple[TokenLogprob, ...] = ()


class StepResult(Struct, frozen=True, array_like=True):
    """Row i says what came of slot `slots[i]` in its incarnation `incarnations[i]`: first the plan's `rows`, in order.

    Rows after those are late ones, of an earlier occupant; they are inert.
    """

    step: StepNo
    epoch: WorkerEpoch
    slots: tuple[Slot, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    values: tuple[int, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()


class Rows(Struct):
    """A result's rows by meaning, in row order."""

    sampled: list[tuple[Slot, Incarnation, int]]
    chunks: list[tuple[Slot, Incarnation]]
    acks: list[tuple[Slot, Incarnation]]


def read_rows(result: StepResult) -> Rows:
    """Decode the sentinels. Any other negative value is a protocol error: it has no meaning."""
    if not len(result.slots) == len(result.incarnations) == len(result.values):
        raise ProtocolError(f"step {result.step}: the columns of the result differ in length")
    sampled: list[tuple[Slot, Incarnation, int]] = list(zip(result.slots, result.incarnations, result.values, strict=True))
    if not result.values or min(result.values) >= 0:
        return Rows(sampled, [], [])
    rows = Rows([row for row in sampled if row[2] >= 0], [], [])
    for slot, incarnation, value in sampled:
        if value == NO_TOKEN_ID:
            rows.chunks.append((slot, incarnation))
        elif value == PREEMPTED_TOKEN_ID:
            rows.acks.append((slot, incarnation))
        elif value < 0:
            raise ProtocolError(f"step {result.step}: row value {value} has no meaning")
    return rows
