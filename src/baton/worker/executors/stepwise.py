"""An Executor based on a forward pass on the host (../forward/): hidden states, logits of the rows that need them, tokens.

launch computes everything before it returns, so no step runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import isfinite

import numpy as np

from baton.kvpool.base import Pool
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Floats, Int64s
from baton.worker.drafters.passes import ForwardPasses
from baton.worker.executors.base import Launched, LoadedExecutor, Sampled
from baton.worker.executors.host_logprobs import describe_prompts
from baton.worker.executors.verify import Verification
from baton.worker.failure import NOT_FINITE, Failure
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward, LoadedForward
from baton.worker.input_batch import InputBatch
from baton.worker.pooling import normed
from baton.worker.sampler import Chosen, SampleRow, plain, sample
from baton.worker.sampling_batch import SamplingBatch
from baton.worker.step_rules import grammar_masks
from baton.worker.token_masks import masks_of


@dataclass(frozen=True, slots=True)
class Computed:
    """A finished step."""

    sampled: Sampled

    def wait(self) -> None:
        pass


def stepwise(loaded: LoadedForward) -> LoadedExecutor:
    def with_pool(pool: Pool, context_tokens: int | None = None, /) -> Stepwise:
        return Stepwise(loaded.with_pool(pool))

    def drafting(pool: Pool, context_tokens: int, /) -> ForwardPasses:
        return ForwardPasses(loaded.with_pool(pool))

    return LoadedExecutor(loaded.kv, with_pool, drafting)


class Stepwise:
    steps_ahead = 1
    samples_on_host = True
    draft_rows_max = 1 << 20
    row_cost = 0.2

    def __init__(self, forward: Forward) -> None:
        self.name = forward.name
        self.arithmetic = forward.arithmetic
        self.config = forward.config
        self.forward = forward
        self._advance: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        pass

    def send_tables(self, sequences: InputBatch) -> None:
        """There is no device: attention reads the tables themselves."""

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Computed:
        self._advance()
        hidden = self.forward.hidden(batch)
        self._advance()
        failed = not_finite(batch, hidden)
        if failed and batch.drafts is not None:
            # A draft that no sampled token equals may be at fault: rows of a sequence share a pass of the attention.
            batch = batch.without_drafts()
            hidden = self.forward.hidden(batch)
            failed = not_finite(batch, hidden)
        prompts = {}
        if sampling.asks_prompts:
            prompts = describe_prompts(batch, sampling, failed, lambda begin, end: self._logits(hidden[begin:end]))
        sampled = self._sample(batch, sampling, hidden, failed)
        sampled.prompts = prompts
        if sampling.pools:
            sampled.embeddings = self._pooled(batch, sampling, hidden, failed)
        self._advance()
        return Computed(sampled)

    def collect(self, launched: Launched) -> Sampled:
        assert type(launched) is Computed
        return launched.sampled

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance
        self.forward.report_progress(word)

    def close(self) -> None:
        self.forward.close()

    def _pooled(self, batch: FlatBatch, sampling: SamplingBatch, hidden: Floats, failed: Collection[int]) -> dict[int, bytes]:
        """Embeddings of prompts that end in this step."""
        vectors, (weight, bias), eps = {}, self.forward.final_norm, self.config.norm_eps
        centred = self.config.traits.layer_norm
        for part in sampling.prompt_parts(batch):
            if part.place in failed:
                continue
            if part.pool.labels:
                if part.last:
                    row = part.row + part.tokens - 1
                    logits = self._logits(hidden[row : row + 1])[0, list(part.pool.labels)]
                    vectors[part.place] = logits.astype("<f4").tobytes()
            else:
                states = normed(hidden[part.row : part.row + part.tokens], weight, eps, centred=centred, bias=bias)
                if vector := part.pool.add(part.begin, states, last=part.last):
                    vectors[part.place] = vector
        return vectors

    def _logits(self, hidden: Floats) -> Floats:
        self._advance()
        return self.forward.logits(hidden)

    # Sampling

    def _sample(self, batch: FlatBatch, sampling: SamplingBatch, hidden: Floats, failed: dict[int, Failure]) -> Sampled:
        """Samples a token for each due sequence that has not failed, and verifies drafts where the batch has some."""
        due = batch.due
        if failed:
            due = due.copy()
            due[list(failed)] = False
        if batch.drafts is not None:
            sampled = Sampled(np.zeros(len(due), np.int64), failed)
            Verification(batch, sampling, hidden, self.forward, np.flatnonzero(due)).run(sampled)
            return sampled
        if due.all():
            chosen = self._choose(sampling, None, hidden if len(hidden) == len(due) else hidden[batch.last_rows])
            return Sampled(chosen.tokens, chosen.failed, chosen.logprobs)
        places, tokens = np.flatnonzero(due), np.zeros(len(due), np.int64)
        if not places.size:
            return Sampled(tokens, failed)
        chosen = self._choose(sampling, places, hidden[batch.last_rows[places]])
        tokens[places] = chosen.tokens
        at = places.tolist()
        failed.update((at[row], why) for row, why in chosen.failed.items())
        return Sampled(tokens, failed, {at[row]: word for row, word in chosen.logprobs.items()})

    def _choose(self, sampling: SamplingBatch, places: Int64s | None, hidden: Floats) -> Chosen:
        """Choose a token per row of `hidden`. `places`: batch index of each row; None: all, in order."""
        if sampling.plain and not sampling.excludes:
            return plain(self.forward.likeliest(hidden))
        places = np.arange(len(hidden)) if places is None else places
        if not sampling.plain:
            return self._sampled(sampling, places, hidden)
        masks = masks_of(grammar_masks(sampling, places, self.config.vocab_size), places)
        chosen = plain(self.forward.likeliest(hidden, masks))
        self._choose_again(sampling, places, hidden, chosen)
        return chosen

    def _sampled(self, sampling: SamplingBatch, places: Int64s, hidden: Floats) -> Chosen:
        slots, states, outputs = sampling.slots[places], sampling.states, sampling.sequences.outputs
        rows = [SampleRow(states[place], outputs(slot)) for place, slot in zip(places.tolist(), slots.tolist(), strict=True)]
        return sample(self.forward.logits(hidden), rows, sampling.draws_of(slots), self.forward.choose)

    def _choose_again(self, sampling: SamplingBatch, places: Int64s, hidden: Floats, chosen: Chosen) -> None:
        """Choose tokens that may be bad words or end too early, from all logits. The likeliest token that the grammar allows is
        rarely excluded."""
        likeliest = zip(chosen.tokens.tolist(), places.tolist(), strict=True)
        rows = [row for row, (token, place) in enumerate(likeliest) if token in sampling.states[place].excluded]
        if rows:
            again = self._sampled(sampling, places[rows], hidden[rows])
            chosen.tokens[rows] = again.tokens
            chosen.failed.update((rows[place], why) for place, why in again.failed.items())


def not_finite(batch: FlatBatch, hidden: Floats) -> dict[int, Failure]:
    """Sequences with hidden states that are not finite. Chunks before the last are checked too: their blocks must not be
    published."""
    with np.errstate(invalid="ignore", over="ignore"):
        if isfinite(hidden.sum()):
            return {}
        finite = np.isfinite(hidden.sum(-1))
    whole = np.logical_and.reduceat(finite, batch.spans.starts[:-1])
    return dict.fromkeys(np.flatnonzero(~whole).tolist(), NOT_FINITE)
