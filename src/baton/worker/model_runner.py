"""Executes plans on a model. What it does for a plan is the whole of `execute`; how, is in the files beside it.

A sequence that fails (not-a-number somewhere, a token id that the model does not have) fails alone: it answers
NO_TOKEN_ID and a RowFailure, in every step that runs it, until it is dropped. A plan that contradicts what is here
raises ProtocolError, after which this worker's state is not to be trusted any more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.errors import ProtocolError
from baton.protocol.ids import Incarnation, Slot
from baton.protocol.step import (
    NO_TOKEN_ID,
    PREEMPTED_TOKEN_ID,
    NewSequence,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from baton.worker.arrays import Floats, Int64s
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward
from baton.worker.input_batch import InputBatch
from baton.worker.kv_pool import KVLayout, KVPool
from baton.worker.logprobs import describe, log_softmax
from baton.worker.sampler import NOT_FINITE, Sampled, SampleRow, sample
from baton.worker.sampling_state import SequenceSampling

PROMPT_ROWS_AT_ONCE = 64
"""Logits of a prompt are worked out so many rows at a time: all of them at once would be gigabytes."""


class ModelRunner:
    def __init__(self, forward: Forward, pool: KVPool, *, slots: int) -> None:
        """`pool`: the one that `forward` is bound to. Both are closed with the runner."""
        layout = pool.layout
        if layout != KVLayout.of(forward.config, layout.block_size, layout.dtype):
            raise ProtocolError(f"{layout} is not what a pool of this model looks like")
        self.config = forward.config
        self.forward = forward
        self.pool = pool
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        """Every slot is empty, as at the start. What is in the pool stays there, and means nothing to anybody."""
        self.batch = InputBatch(slots=self._slots, blocks=self.pool.blocks, block_size=self.pool.layout.block_size)
        self._sampling: list[SequenceSampling | None] = [None] * self._slots
        self._failed: dict[int, str] = {}
        "Slots that answer with this reason until they are dropped."
        self._last_step: int | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self._take_in(plan)
        step = _Step()
        slots = self.batch.slots_of(plan.run)
        sound = np.array([slot not in self._failed for slot in plan.run.slots], bool)
        running, counts = slots[sound], np.array(plan.run.counts, np.int64)[sound]
        if running.size:
            flat = self.batch.flatten(running, counts)
            hidden = self.forward.hidden(flat)
            self._fail_not_finite(flat, hidden)
            self._look_at_prompts(flat, hidden, step)
            self.batch.advance(running, counts)
            self._sample(flat, hidden, step)
        return self._result(plan, step)

    def close(self) -> None:
        """Give the pool back: nothing can be executed any more."""
        self.forward.close()
        self.pool.close()

    # The plan

    def _take_in(self, plan: StepPlan) -> None:
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise ProtocolError(f"step {plan.step} follows step {self._last_step}: a plan was lost or came twice")
        self._last_step = plan.step
        for slot, incarnation in plan.drops:
            self.batch.drop(slot, incarnation)
            self._sampling[slot] = None
            self._failed.pop(slot, None)
        for new in plan.new:
            self._seat(new)
        for slot, block in plan.grown:
            self.batch.grow(slot, block)
        for slot, place, block in plan.folded:
            self.batch.fold(slot, place, block)

    def _seat(self, new: NewSequence) -> None:
        self.batch.seat(new)
        prompt, outputs = new.tokens[: new.prompt_tokens], new.tokens[new.prompt_tokens :]
        vocabulary = self.config.vocab_size
        self._sampling[new.slot] = SequenceSampling(new.sampling, new.index, vocabulary, prompt, outputs)
        if not 0 <= min(new.tokens) <= max(new.tokens) < vocabulary:
            self._failed[new.slot] = f"a token id of the prompt is outside the vocabulary of {vocabulary}"

    # The step

    def _fail_not_finite(self, flat: FlatBatch, hidden: Floats) -> None:
        """A chunk that is not the last is judged too: what it left in the pool must not be published."""
        with np.errstate(invalid="ignore", over="ignore"):
            finite = np.isfinite(hidden.sum(-1))
        if finite.all():
            return
        whole = np.logical_and.reduceat(finite, flat.spans.starts[:-1])
        self._failed.update(dict.fromkeys(flat.spans.slots[~whole].tolist(), NOT_FINITE))

    def _sample(self, flat: FlatBatch, hidden: Floats, step: _Step) -> None:
        slots = flat.spans.slots
        due = np.array([i for i in np.flatnonzero(flat.due).tolist() if int(slots[i]) not in self._failed], np.int64)
        if not due.size:
            return
        slots = slots[due]
        rows = [SampleRow(state, self.batch.outputs(slot)) for slot, state in self._states(slots)]
        sampled = sample(self.forward.logits(hidden[flat.last_rows[due]]), rows)
        self._keep(slots, sampled, step)

    def _keep(self, slots: Int64s, sampled: Sampled, step: _Step) -> None:
        for row, reason in sampled.failed.items():
            self._failed[int(slots[row])] = reason
        good = np.array([row for row in range(len(slots)) if row not in sampled.failed], np.int64)
        slots, tokens = slots[good], sampled.tokens[good]
        self.batch.append(slots, tokens)
        for (slot, state), token in zip(self._states(slots), tokens.tolist(), strict=True):
            state.sampled(token)
            step.tokens[slot] = token
        step.logprobs = dict(zip(slots.tolist(), (sampled.logprobs.get(row) for row in good.tolist()), strict=True))

    def _states(self, slots: Int64s) -> Iterator[tuple[int, SequenceSampling]]:
        for slot in slots.tolist():
            state = self._sampling[slot]
            assert state is not None  # taken slots have one
            yield slot, state

    # Log-probabilities of prompts

    def _look_at_prompts(self, flat: FlatBatch, hidden: Floats, step: _Step) -> None:
        """The row at position p says what the model thought of the token at p + 1. Of the first token it thought nothing."""
        for at, (slot, state) in enumerate(self._states(flat.spans.slots)):
            top = state.params.prompt_logprobs
            if top is None or slot in self._failed:
                continue
            begin, first = int(flat.spans.contexts[at]), int(flat.spans.starts[at])
            end = min(begin + int(flat.spans.counts[at]), int(self.batch.prompt_tokens[slot]) - 1)
            if begin < end:
                targets = self.batch.tokens[slot, begin + 1 : end + 1].astype(np.int64)
                step.prompts[slot] = (begin + 1, self._describe(hidden[first : first + end - begin], targets, top))

    def _describe(self, hidden: Floats, targets: Int64s, top: int) -> tuple[TokenLogprob, ...]:
        described: list[TokenLogprob] = []
        for at in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
            part = slice(at, at + PROMPT_ROWS_AT_ONCE)
            described += describe(log_softmax(self.forward.logits(hidden[part])), targets[part], top)
        return tuple(described)

    # The result

    def _result(self, plan: StepPlan, step: _Step) -> StepResult:
        """Rows in the plan's order: what ran, then what was dropped."""
        run = plan.run.slots
        incarnations = [Incarnation(n) for n in self.batch.incarnations[list(run)].tolist()]
        failures = [
            RowFailure(slot, incarnation, self._failed[slot])
            for slot, incarnation in (zip(run, incarnations, strict=True) if self._failed else ())
            if slot in self._failed
        ]
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            slots=plan.rows,
            incarnations=(*incarnations, *(incarnation for _, incarnation in plan.drops)),
            values=(*(step.tokens.get(slot, NO_TOKEN_ID) for slot in run), *([PREEMPTED_TOKEN_ID] * len(plan.drops))),
            failures=tuple(failures),
            logprobs=tuple(step.row_logprobs(run, incarnations)),
        )


class _Step:
    """What came of one step, by slot."""

    __slots__ = ("logprobs", "prompts", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.logprobs: dict[int, TokenLogprob | None] = {}
        self.prompts: dict[int, tuple[int, tuple[TokenLogprob, ...]]] = {}

    def row_logprobs(self, slots: tuple[Slot, ...], incarnations: list[Incarnation]) -> Iterator[RowLogprobs]:
        if not self.prompts and not any(self.logprobs.values()):
            return
        for slot, incarnation in zip(slots, incarnations, strict=True):
            sampled, (prompt_from, prompt) = self.logprobs.get(slot), self.prompts.get(slot, (0, ()))
            if sampled is not None or prompt:
                yield RowLogprobs(slot, incarnation, sampled, prompt_from, prompt)
