"""A launched step: its sequences, the due ones, and in the end its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from baton.protocol.ids import Incarnation
from baton.protocol.step import PREEMPTED_TOKEN_ID, BatchRows, RowFailure, RowLogprobs, StepPlan, StepResult
from baton.worker.arrays import Int64s
from baton.worker.executors.base import Launched, Sampled
from baton.worker.failure import Failure
from baton.worker.input_batch import BatchLayout, InputBatch
from baton.worker.sampling_batch import SamplingBatch
from baton.worker.sampling_columns import SamplingColumns

NO_SEQUENCES: Int64s = np.zeros(0, np.int64)


class BatchMembers:
    """The sequences of a step, and what depends only on them: computed once for all steps with the same sequences."""

    __slots__ = ("failed", "incarnations", "layout", "run", "sampling", "sound_incarnations")

    def __init__(self, run: BatchRows, batch: InputBatch, sampling: SamplingColumns, failed: Mapping[int, Failure]) -> None:
        """`run` must be checked."""
        self.run = run
        self.incarnations = tuple([Incarnation(n) for n in batch.incarnations[list(run.slots)].tolist()])
        self.failed: dict[int, Failure] = {slot: failed[slot] for slot in run.slots if slot in failed} if failed else {}
        "Sequences that had failed before, and are not computed any more."
        sound = [(slot, count) for slot, count in zip(run.slots, run.counts, strict=True) if slot not in self.failed]
        self.layout = BatchLayout(
            np.array([slot for slot, _ in sound], np.int64), np.array([count for _, count in sound], np.int64)
        )
        self.sound_incarnations: Int64s = batch.incarnations[self.layout.slots]
        "Incarnations, in the order of `layout`."
        self.sampling = SamplingBatch(self.layout.slots, sampling, batch)


class InFlightStep:
    __slots__ = (
        *("began", "drafted", "drafting", "due", "failed", "launched", "members", "modelled", "needs_tokens", "places", "plan"),
        *("rows", "sampled", "waited"),
    )

    def __init__(self, plan: StepPlan, members: BatchMembers) -> None:
        self.plan = plan
        self.members = members
        self.launched: Launched | None = None
        "Data of the launched step. None: there was nothing to compute."
        self.rows = 0
        self.began = 0.0
        "Time of the launch."
        self.waited = False
        "Whether the plan waited for the tokens before it, so that drafts could follow them."
        self.needs_tokens = False
        "Whether the step waits for the previous tokens even without drafts. Known only where drafts have a price."
        self.due: Int64s | None = None
        "Mask of the sequences in the layout that get a token. None: all."
        self.places = NO_SEQUENCES
        "Positions of their tokens (InputBatch.learn)."
        self.drafted: dict[int, int] = {}
        "Draft tokens by slot, if there are any."
        self.drafting = 0.0
        "Seconds that the draft model took before the launch."
        self.modelled: dict[int, int] = {}
        "Draft tokens of the draft model, by slot."
        self.sampled = Sampled(NO_SEQUENCES)
        self.failed: dict[int, Failure] = {}
        "Slots that have failed since the launch, in this step or in an earlier one."

    def wait(self) -> None:
        """Waits until collecting is immediate. Callable from any thread."""
        if self.launched is not None:
            self.launched.wait()

    def runs(self, slot: int, incarnation: int) -> bool:
        return any(pair == (slot, incarnation) for pair in zip(self.members.run.slots, self.members.incarnations, strict=True))

    def got_token(self, place: int) -> bool:
        """Whether the step has a token for this index of the layout."""
        return self.members.layout.slots[place] not in self.failed and (self.due is None or place in self.due)

    def of_due(self, column: Int64s) -> Int64s:
        """The entries of a layout column for the due sequences."""
        return column if self.due is None else column[self.due]

    def result(self) -> StepResult:
        """Rows in the plan's order: run sequences, then dropped ones."""
        plan, members, sampled = self.plan, self.members, self.sampled
        ran, incarnations, values = plan.run.slots, members.incarnations, tuple(self.of_due(sampled.tokens).tolist())
        failed = members.failed | self.failed
        lengths = (1,) * len(ran)
        if failed or len(values) != len(ran):
            tokens = dict(zip(self.of_due(members.layout.slots).tolist(), values, strict=True))
            tokens = {slot: token for slot, token in tokens.items() if slot not in failed}
            lengths = tuple([int(slot in tokens) for slot in ran])
            values = tuple([tokens[slot] for slot in ran if slot in tokens])
        if sampled.accepted:
            lengths, values = self._with_accepted(lengths, values)
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
            failures=tuple(self._failures(failed)) if failed else (),
            logprobs=tuple(self._logprobs()) if sampled.logprobs or sampled.prompts or sampled.embeddings else (),
            drafted=tuple([self.drafted.get(slot, 0) for slot in ran]) if self.drafted else (),
        )

    def _with_accepted(self, lengths: tuple[int, ...], values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths and values of the rows, with accepted drafts before the token of their row."""
        slots = self.members.layout.listed
        accepted = {slots[place]: tokens for place, tokens in self.sampled.accepted.items()}
        flat, rows = [], iter(values)
        for slot, length in zip(self.plan.run.slots, lengths, strict=True):
            if length:
                flat += [*accepted.get(slot, ()), next(rows)]
        more = [len(accepted.get(slot, ())) if length else 0 for slot, length in zip(self.plan.run.slots, lengths, strict=True)]
        return tuple([length + some for length, some in zip(lengths, more, strict=True)]), tuple(flat)

    def _failures(self, failed: Mapping[int, Failure]) -> Iterator[RowFailure]:
        for slot, incarnation in zip(self.members.run.slots, self.members.incarnations, strict=True):
            if slot in failed:
                yield RowFailure(slot, incarnation, failed[slot].reason, failed[slot].error)

    def _logprobs(self) -> Iterator[RowLogprobs]:
        members, sampled = self.members, self.sampled
        place_of = {slot: place for place, slot in enumerate(members.layout.listed)}
        for slot, incarnation in zip(members.run.slots, members.incarnations, strict=True):
            place = place_of.get(slot)
            if place is None or slot in self.failed:
                continue
            word, (prompt_from, prompt) = sampled.logprobs.get(place), sampled.prompts.get(place, (0, ()))
            embedding = sampled.embeddings.get(place, b"")
            for earlier in sampled.accepted_logprobs.get(place, ()):
                yield RowLogprobs(slot, incarnation, earlier)
            if word is not None or prompt or embedding:
                yield RowLogprobs(slot, incarnation, word, prompt_from, prompt, embedding)
