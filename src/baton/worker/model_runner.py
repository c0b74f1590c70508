"""Executes plans on a model. What it does for a plan is the whole of `execute`; how, is in the files beside it.

A sequence that fails (not-a-number somewhere, a token id that the model does not have) fails alone: it answers
no token and a RowFailure, in every step that runs it, until it is dropped. A plan that contradicts what is here
raises ProtocolError, after which this worker's state is not to be trusted any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite

import numpy as np

from baton.errors import ProtocolError
from baton.kvpool.pool import KVPool
from baton.protocol.ids import Incarnation
from baton.protocol.progress import ProgressWord
from baton.protocol.request import SamplingParams
from baton.protocol.step import (
    PREEMPTED_TOKEN_ID,
    NewSequence,
    RowFailure,
    RowLogprobs,
    Run,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from baton.worker.arrays import Floats, Int64s
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward
from baton.worker.input_batch import InputBatch, Lineup
from baton.worker.kv_layout import kv_layout
from baton.worker.logprobs import describe, log_softmax
from baton.worker.sampler import NOT_FINITE, Sampled, SampleRow, plain, sample
from baton.worker.sampling_state import BadWords, SequenceSampling

PROMPT_ROWS_AT_ONCE = 64
"""Logits of a prompt are worked out so many rows at a time: all of them at once would be gigabytes."""


class ModelRunner:
    def __init__(self, forward: Forward, pool: KVPool, *, slots: int) -> None:
        """`pool`: the one that `forward` is bound to. Both are closed with the runner."""
        layout = pool.layout
        if layout != kv_layout(forward.config, layout.block_size, layout.dtype):
            raise ProtocolError(f"{layout} is not what a pool of this model looks like")
        self.config = forward.config
        self.forward = forward
        self.pool = pool
        self._slots = slots
        self._advance: Callable[[], None] = lambda: None
        self.clear()

    def clear(self) -> None:
        """Every slot is empty, as at the start. What is in the pool stays there, and means nothing to anybody."""
        self.batch = InputBatch(slots=self._slots, blocks=self.pool.blocks, block_size=self.pool.layout.block_size)
        self._sampling: list[SequenceSampling | None] = [None] * self._slots
        self._failed: dict[int, str] = {}
        "Slots that answer with this reason until they are dropped."
        self._last_step: int | None = None
        self._last_crew: _Crew | None = None
        "Of the last step, while it is still right."

    def report_progress(self, word: ProgressWord) -> None:
        """The word is advanced from now on: per layer, and at every phase of a step."""
        self._advance = word.advance
        self.forward.report_progress(word)

    def execute(self, plan: StepPlan) -> StepResult:
        self._advance()
        self._take_in(plan)
        step, crew = _Step(), self._crew(plan.run)
        if crew.states:
            flat = self.batch.flatten(crew.lineup)
            self._advance()
            hidden = self.forward.hidden(flat)
            self._advance()
            self._fail_not_finite(flat, hidden)
            if crew.asks_prompts:
                self._look_at_prompts(crew, flat, hidden, step)
            self.batch.advance(crew.lineup)
            self._sample(crew, flat, hidden, step)
            self._advance()
        return self._result(plan, crew, step)

    def close(self) -> None:
        """Give the pool back: nothing can be executed any more."""
        self.forward.close()
        self.pool.close()

    # The plan

    def _take_in(self, plan: StepPlan) -> None:
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise ProtocolError(f"step {plan.step} follows step {self._last_step}: a plan was lost or came twice")
        self._last_step = plan.step
        if plan.drops or plan.new:
            self._last_crew = None
        for slot, incarnation in plan.drops:
            self.batch.drop(slot, incarnation)
            self._sampling[slot] = None
            self._failed.pop(slot, None)
        bad_words: dict[int, BadWords | None] = {}  # by row of the settings: thousands of tokens, for up to 64 sequences
        for new in plan.new:
            if not 0 <= new.sampling < len(plan.sampling):
                raise ProtocolError(f"slot {new.slot} has settings {new.sampling}; the plan has {len(plan.sampling)}")
            made = self._seat(new, plan.sampling[new.sampling], bad_words.get(new.sampling))
            bad_words[new.sampling] = made.bad_words
        for slot, block in plan.grown:
            self.batch.grow(slot, block)
        for slot, place, block in plan.folded:
            self.batch.fold(slot, place, block)

    def _seat(self, new: NewSequence, sampling: SamplingParams, bad_words: BadWords | None) -> SequenceSampling:
        self.batch.seat(new)
        prompt, outputs = new.tokens[: new.prompt_tokens], new.tokens[new.prompt_tokens :]
        vocabulary = self.config.vocab_size
        made = self._sampling[new.slot] = SequenceSampling(sampling, new.index, vocabulary, prompt, outputs, bad_words)
        if not 0 <= min(new.tokens) <= max(new.tokens) < vocabulary:
            self._fail(new.slot, f"a token id of the prompt is outside the vocabulary of {vocabulary}")
        return made

    def _fail(self, slot: int, reason: str) -> None:
        self._failed[slot] = reason
        self._last_crew = None

    # The step

    def _crew(self, run: Run) -> _Crew:
        """Most steps run what the last one ran."""
        crew = self._last_crew
        if crew is None or crew.run != run:
            self.batch.check_run(run)
            crew = self._last_crew = _Crew(run, self.batch.incarnations, self._sampling, self._failed)
        return crew

    def _fail_not_finite(self, flat: FlatBatch, hidden: Floats) -> None:
        """A chunk that is not the last is judged too: what it left in the pool must not be published."""
        with np.errstate(invalid="ignore", over="ignore"):
            if isfinite(hidden.sum()):
                return
            finite = np.isfinite(hidden.sum(-1))
        whole = np.logical_and.reduceat(finite, flat.spans.starts[:-1])
        for slot in flat.spans.slots[~whole].tolist():
            self._fail(slot, NOT_FINITE)

    def _sample(self, crew: _Crew, flat: FlatBatch, hidden: Floats, step: _Step) -> None:
        slots, states, due = crew.lineup.slots, crew.states, flat.due
        if self._failed:
            due = due & [slot not in self._failed for slot in slots.tolist()]
        if not due.all():
            places = np.flatnonzero(due)
            slots, states = slots[places], [states[place] for place in places.tolist()]
            if not states:
                return
        if len(states) != len(hidden):
            hidden = hidden[flat.last_rows[due]]
        if crew.plain:
            sampled = plain(self.forward.likeliest(hidden))
            if crew.excludes:
                self._choose_again(slots, states, hidden, sampled)
        else:
            sampled = self._chosen(slots, states, hidden)
        self._keep(slots, states, sampled, step)

    def _chosen(self, slots: Int64s, states: list[SequenceSampling], hidden: Floats) -> Sampled:
        outputs = map(self.batch.outputs, slots.tolist())
        rows = [SampleRow(state, so_far) for state, so_far in zip(states, outputs, strict=True)]
        return sample(self.forward.logits(hidden), rows, self.forward.choose)

    def _choose_again(self, slots: Int64s, states: list[SequenceSampling], hidden: Floats, sampled: Sampled) -> None:
        """The likeliest of all is the likeliest of those allowed, or it is forbidden: seldom, and then all are needed."""
        likeliest = zip(sampled.tokens.tolist(), states, strict=True)
        rows = [row for row, (token, state) in enumerate(likeliest) if token in state.excluded]
        if rows:
            again = self._chosen(slots[rows], [states[row] for row in rows], hidden[rows])
            sampled.tokens[rows] = again.tokens
            sampled.failed.update((rows[place], why) for place, why in again.failed.items())

    def _keep(self, slots: Int64s, states: list[SequenceSampling], sampled: Sampled, step: _Step) -> None:
        tokens = sampled.tokens
        step.logprobs = {int(slots[row]): said for row, said in sampled.logprobs.items()}
        if sampled.failed:
            for row, reason in sampled.failed.items():
                self._fail(int(slots[row]), reason)
            good = [row for row in range(len(slots)) if row not in sampled.failed]
            slots, tokens, states = slots[good], tokens[good], [states[row] for row in good]
        self.batch.append(slots, tokens)
        step.tokens = dict(zip(slots.tolist(), tokens.tolist(), strict=True))
        for state, token in zip(states, step.tokens.values(), strict=True):
            state.sampled(token)

    # Log-probabilities of prompts

    def _look_at_prompts(self, crew: _Crew, flat: FlatBatch, hidden: Floats, step: _Step) -> None:
        """The row at position p says what the model thought of the token at p + 1. Of the first token it thought nothing."""
        for at, (slot, state) in enumerate(zip(crew.lineup.slots.tolist(), crew.states, strict=True)):
            top = state.params.prompt_logprobs
            if top is None or slot in self._failed:
                continue
            begin, first = int(flat.spans.contexts[at]), int(flat.spans.starts[at])
            end = min(begin + int(crew.lineup.counts[at]), int(self.batch.prompt_tokens[slot]) - 1)
            if begin < end:
                targets = self.batch.tokens[slot, begin + 1 : end + 1].astype(np.int64)
                step.prompts[slot] = (begin + 1, self._describe(hidden[first : first + end - begin], targets, top))

    def _describe(self, hidden: Floats, targets: Int64s, top: int) -> tuple[TokenLogprob, ...]:
        described: list[TokenLogprob] = []
        for at in range(0, len(targets), PROMPT_ROWS_AT_ONCE):
            self._advance()
            part = slice(at, at + PROMPT_ROWS_AT_ONCE)
            described += describe(log_softmax(self.forward.logits(hidden[part])), targets[part], top)
        return tuple(described)

    # The result

    def _result(self, plan: StepPlan, crew: _Crew, step: _Step) -> StepResult:
        """Rows in the plan's order: what ran, then what was dropped."""
        ran, incarnations, tokens = plan.run.slots, crew.incarnations, step.tokens
        lengths = (1,) * len(ran) if len(tokens) == len(ran) else tuple([int(slot in tokens) for slot in ran])
        values = tuple([tokens[slot] for slot in ran if slot in tokens])
        if plan.drops:
            incarnations += tuple(incarnation for _, incarnation in plan.drops)
            lengths += (1,) * len(plan.drops)
            values += (PREEMPTED_TOKEN_ID,) * len(plan.drops)
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            slots=plan.rows,
            incarnations=incarnations,
            lengths=lengths,
            values=values,
            failures=tuple(self._failures(crew)) if self._failed else (),
            logprobs=tuple(step.row_logprobs(crew)) if step.logprobs or step.prompts else (),
        )

    def _failures(self, crew: _Crew) -> Iterator[RowFailure]:
        for slot, incarnation in zip(crew.run.slots, crew.incarnations, strict=True):
            if slot in self._failed:
                yield RowFailure(slot, incarnation, self._failed[slot])


class _Crew:
    """Who runs in a step, and what follows from that alone: worked out once for all steps in which the same ones run."""

    __slots__ = ("asks_prompts", "excludes", "incarnations", "lineup", "plain", "run", "states")

    def __init__(
        self, run: Run, incarnations: Int64s, sampling: list[SequenceSampling | None], failed: Mapping[int, str]
    ) -> None:
        """`run` as checked; the other columns are by slot."""
        self.run = run
        self.incarnations = tuple([Incarnation(n) for n in incarnations[list(run.slots)].tolist()])
        sound = [(slot, count) for slot, count in zip(run.slots, run.counts, strict=True) if slot not in failed]
        self.lineup = Lineup(np.array([slot for slot, _ in sound], np.int64), np.array([count for _, count in sound], np.int64))
        self.states = [state for slot, _ in sound if (state := sampling[slot]) is not None]  # taken slots have one
        self.plain = all(state.plain for state in self.states)
        self.excludes = any(state.excluded for state in self.states)
        self.asks_prompts = any(state.params.prompt_logprobs is not None for state in self.states)


class _Step:
    """What came of one step, by slot."""

    __slots__ = ("logprobs", "prompts", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.logprobs: dict[int, TokenLogprob] = {}
        self.prompts: dict[int, tuple[int, tuple[TokenLogprob, ...]]] = {}

    def row_logprobs(self, crew: _Crew) -> Iterator[RowLogprobs]:
        for slot, incarnation in zip(crew.run.slots, crew.incarnations, strict=True):
            sampled, (prompt_from, prompt) = self.logprobs.get(slot), self.prompts.get(slot, (0, ()))
            if sampled is not None or prompt:
                yield RowLogprobs(slot, incarnation, sampled, prompt_from, prompt)
