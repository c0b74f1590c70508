"""A step: one StepPlan out, one StepResult back. Scheduler and worker share these two values and nothing else.

A running sequence occupies a slot. The worker keeps, for each slot, the occupant's tokens and block table; a plan has only the
changes. Plans are executed in the order of their numbers. So a block may be reassigned in the very plan that takes it from its
last owner: every earlier plan has been executed by then.

On the wire a result is flat int32 values, which a kernel can write, and a length per row: 0 for a chunk of a prompt that is not
the last, 1 for a token, and 1 more for each draft that was accepted (speculative decoding). `read_rows` turns rows into typed
columns here, at the boundary; no other code compares an int with a sentinel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct, msgpack

from baton.errors import ProtocolError
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.numbers import Natural
from baton.protocol.request import SamplingParams, TokenId

PREEMPTED_TOKEN_ID: Final = -9
"""The only value of a dropped slot's row: the worker has executed the drop, and no row of this incarnation follows."""

TOKEN_ID_MAX: Final = 2**31 - 1
"""Maximum of a value: an int32."""


class NewSequence(Struct, frozen=True, array_like=True):
    """A sequence that gets a slot: its complete state, sent once."""

    slot: Slot
    incarnation: Incarnation
    tokens: tuple[TokenId, ...]
    "Prompt and every output so far, frozen for this incarnation: exactly these are to be prefilled."
    prompt_tokens: int
    "Number of prompt tokens. A draw's position is counted from here."
    computed_tokens: int
    "Leading tokens whose KV is already in the blocks; less than len(tokens)."
    blocks: tuple[BlockId, ...]
    sampling: int
    "Row of the settings in the plan's `sampling`: shared settings are sent once."
    index: int
    "Index among the n sequences of its request."
    adapter: int = 0
    "LoRA adapter to compute with. 0, the only value today: none."


class BatchRows(Struct, frozen=True, array_like=True):
    """The sequences that compute in this step, in columns: one object per step, not one per token.

    A sequence whose known tokens are all computed runs the token it sampled last; the worker has it, the scheduler may not have
    seen it yet.
    """

    slots: tuple[Slot, ...] = ()
    counts: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    """Maximum of draft tokens beside each row's count (speculative decoding). The worker proposes and verifies them, and knows
    their positions. Empty: none in this step."""


class StepPlan(Struct, frozen=True, array_like=True):
    """The worker's next step. Order: drops, then new sequences, then table changes, then the run."""

    step: StepNo
    epoch: WorkerEpoch
    drops: tuple[tuple[Slot, Incarnation], ...] = ()
    """Slots to drop, on preemption, abort or end: the worker forgets the slot and answers PREEMPTED_TOKEN_ID in this very step,
    even if nothing runs."""
    new: tuple[NewSequence, ...] = ()
    grown: tuple[tuple[Slot, BlockId], ...] = ()
    "Slots and blocks: the block is appended to the slot's table."
    deduplicated: tuple[tuple[Slot, int, BlockId], ...] = ()
    "Slots, places and blocks: entry i of the slot's table is replaced by a block with the same content."
    run: BatchRows = BatchRows()
    sampling: tuple[SamplingParams, ...] = ()
    "Distinct settings of `new`. max_tokens is left out: the scheduler counts tokens, the worker does not."

    @property
    def rows(self) -> tuple[Slot, ...]:
        """The slots that the result must answer for, in this order: the run, then the drops."""
        return self.run.slots + tuple(slot for slot, _ in self.drops) if self.drops else self.run.slots

    @property
    def tokens(self) -> int:
        """Maximum of tokens that the step computes."""
        return sum(self.run.counts) + sum(self.run.drafts)


RowError = Literal["row_failed", "dead_end"]
"""Errors of a row. row_failed: the model cannot compute it. dead_end: the request itself excludes every token."""


class RowFailure(Struct, frozen=True, array_like=True):
    """The worker cannot continue this sequence; its neighbours are not affected."""

    slot: Slot
    incarnation: Incarnation
    reason: str
    error: RowError = "row_failed"


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability and rank of one token."""

    token: TokenId
    logprob: float
    """Log-probability, without a range: -inf is an excluded token, and a NaN of one prompt must not end the session of its
    worker."""
    rank: Natural
    "Rank: 1 for the likeliest token."
    top: tuple[tuple[TokenId, float], ...] = ()
    "Likeliest tokens, best first."


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Output of a sequence besides tokens. The core forwards it unread."""

    slot: Slot
    incarnation: Incarnation
    sampled: TokenLogprob | None = None
    prompt_from: Natural = 0
    "Position of the first of `prompt`. A prompt computed twice is reported twice; the receiver keeps one."
    prompt: tuple[TokenLogprob, ...] = ()
    embedding: bytes = b""
    "The pooled prompt, if wanted and complete: float32, little-endian."


Row = tuple[Slot, Incarnation, Sequence[int]]
"""(slot, its incarnation, values): tokens, none, or PREEMPTED_TOKEN_ID alone."""


class StepResult(Struct, frozen=True, array_like=True):
    """Row i is the result of slot `slots[i]` in its incarnation `incarnations[i]`: the next `lengths[i]` of `values`.

    First the plan's `rows`, in order. Further rows are late ones, of an earlier occupant; they are ignored.
    """

    step: StepNo
    epoch: WorkerEpoch
    slots: tuple[Slot, ...] = ()
    incarnations: tuple[Incarnation, ...] = ()
    lengths: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    "Values of all rows. A row with several tokens has several of them, in order."
    drafted: tuple[int, ...] = ()
    "Draft tokens that each row of the run computed. Empty: none."

    @classmethod
    def of(
        cls,
        step: StepNo,
        epoch: WorkerEpoch,
        rows: Iterable[Row],
        failures: tuple[RowFailure, ...] = (),
        logprobs: tuple[RowLogprobs, ...] = (),
    ) -> StepResult:
        """Build a result from rows one by one, for workers that need not be fast."""
        slots, incarnations, values = zip(*rows, strict=True) if (rows := list(rows)) else ((), (), ())
        flat = tuple(value for row in values for value in row)
        return cls(step, epoch, slots, incarnations, tuple(map(len, values)), flat, failures, logprobs)

    @property
    def rows(self) -> list[Row]:
        """Columns as rows. The columns must be complete."""
        ends = list(accumulate(self.lengths))
        pieces = [self.values[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]
        return list(zip(self.slots, self.incarnations, pieces, strict=True))


DIGEST_BYTES: Final = 8


class StepDigest(Struct, frozen=True, array_like=True):
    """Digest of a result. Every rank but the first sends it: all ranks of a worker set compute the same result."""

    step: StepNo
    epoch: WorkerEpoch
    digest: bytes


def digest_of(result: StepResult) -> StepDigest:
    """Digest of a result. Log-probabilities and reasons of failures are left out: no state depends on them."""
    failed = [(failure.slot, failure.incarnation, failure.error) for failure in result.failures]
    rows = (result.slots, result.incarnations, result.lengths, result.values, result.drafted, failed)
    return StepDigest(result.step, result.epoch, blake2b(_ROWS.encode(rows), digest_size=DIGEST_BYTES).digest())


_ROWS: Final = msgpack.Encoder()


class Rows(Struct):
    """A result's rows by meaning, in row order. No code above this file compares an int with a sentinel."""

    sampled: list[tuple[Slot, int]]
    "Slots with their sampled token, if no drafts were planned for them."
    chunks: list[Slot]
    "Slots with a chunk of a prompt that is not the last, or a row that failed."
    acks: list[Slot]
    "Slots whose drop is executed."
    drafted: list[tuple[Slot, tuple[int, ...], int, int]] = []
    """Slots with planned drafts: their tokens, of which the last one is no draft, the number of planned drafts, and of drafts
    that were verified."""


def read_rows(plan: StepPlan, unfinished: Collection[Slot], result: StepResult) -> Rows:
    """Decode the rows of the plan; those in `unfinished` have more of their prompt to come, so no token yet.

    Every row is checked against the plan. A token that is not due, a missing token, or an unplanned acknowledgement raises
    ProtocolError: the worker's state is not the expected one.
    """
    rows, count, lengths = plan.rows, len(plan.run.slots), result.lengths
    if not len(result.slots) == len(result.incarnations) == len(lengths):
        raise ProtocolError(f"step {result.step}: the columns of the result differ in length")
    ones = lengths.count(1) == len(lengths)  # as in most steps; checked first, because 256 rows are many
    if len(lengths) != len(result.values) if ones else sum(lengths) != len(result.values) or min(lengths) < 0:
        raise ProtocolError(f"step {result.step}: the lengths of the rows are not those of the values")
    if result.slots[: len(rows)] != rows:
        raise ProtocolError(f"step {result.step}: the rows of the result are not those of the plan")
    acks = list(rows[count:])
    tokens = count if ones else sum(lengths[:count])
    if lengths[count : len(rows)] != (1,) * len(acks) or result.values[tokens : tokens + len(acks)] != _DROPPED * len(acks):
        raise ProtocolError(f"step {result.step}: a drop is not acknowledged")
    values = result.values[:tokens]
    if values and not 0 <= min(values) <= max(values) <= TOKEN_ID_MAX:
        raise ProtocolError(f"step {result.step}: a value from {min(values)} to {max(values)} is no token id")
    if ones and not unfinished and not plan.run.drafts and not result.drafted:
        return Rows(list(zip(plan.run.slots, values, strict=True)), [], acks)
    _check_lengths(plan, unfinished, result)
    if plan.run.drafts:
        return _rows_with_drafts(plan, result, acks)
    sampled = [slot for slot, length in zip(plan.run.slots, lengths, strict=False) if length]
    chunks = [slot for slot, length in zip(plan.run.slots, lengths, strict=False) if not length]
    return Rows(list(zip(sampled, values, strict=True)), chunks, acks)


def _check_lengths(plan: StepPlan, unfinished: Collection[Slot], result: StepResult) -> None:
    """Check the lengths: a due row has one token, and one more for each draft that is accepted; other rows have none."""
    slots, none = plan.run.slots, (0,) * len(plan.run.slots)
    planned, drafted = plan.run.drafts or none, result.drafted or none
    if len(drafted) != len(slots) or not all(0 <= some <= most for some, most in zip(drafted, planned, strict=True)):
        raise ProtocolError(f"step {result.step}: the worker's drafts are not those of the plan")
    failed = [(failure.slot, failure.incarnation) for failure in result.failures]
    for slot, incarnation, length, drafts in zip(slots, result.incarnations, result.lengths, drafted, strict=False):
        due = slot not in unfinished and (slot, incarnation) not in failed
        if not due <= length <= due * (1 + drafts):
            raise ProtocolError(f"step {result.step}: slot {slot} answers {length} tokens")


def _rows_with_drafts(plan: StepPlan, result: StepResult, acks: list[Slot]) -> Rows:
    rows, at = Rows([], [], acks, []), 0
    verified = result.drafted or (0,) * len(plan.run.slots)
    for slot, length, drafts, ran in zip(plan.run.slots, result.lengths, plan.run.drafts, verified, strict=False):
        tokens = result.values[at : at + length]
        at += length
        if not length:
            rows.chunks.append(slot)
        elif drafts:
            rows.drafted.append((slot, tokens, drafts, ran))
        else:
            rows.sampled.append((slot, tokens[0]))
    return rows


_DROPPED: Final = (PREEMPTED_TOKEN_ID,)
