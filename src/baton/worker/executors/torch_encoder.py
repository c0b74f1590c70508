"""An Executor of an encoder: it computes a prompt as a whole in the step in which its last tokens are due, and keeps nothing.

A chunk that is not the last computes nothing. With the last one all tokens of the prompt are read from its slot, so chunks,
cached prefixes, preemption and replay change no result. Blocks of the pool are empty: only the scheduler counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind
from baton.models.encoders.config import EncoderConfig
from baton.models.encoders.torch_encoder import Encoder
from baton.models.loaders.weights import RawWeights
from baton.models.torch_weights import Weights
from baton.protocol.progress import ProgressWord
from baton.worker.arithmetic import TORCH
from baton.worker.arrays import Int32s
from baton.worker.executors.base import Launched, LoadedExecutor, Sampled
from baton.worker.executors.stepwise import Computed
from baton.worker.failure import NOT_FINITE, Failure
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.torch_forward import machine_of
from baton.worker.input_batch import InputBatch
from baton.worker.pooling import PromptPool, unit_vector
from baton.worker.sampling_batch import SamplingBatch

GENERATES_NOTHING = Failure("the model is an encoder: it gives vectors or classes and generates no text")
NO_SUCH_CLASS = Failure("the model has no class of this number")
TOO_LONG = Failure("the prompt has more tokens than the encoder has positions")
Pooled = tuple[Tensor, PromptPool]
"""States of a prompt, and the requested pooling."""


def encoder_on_host(config: EncoderConfig, raw: RawWeights, threads: int) -> Encoder:
    torch.set_num_threads(threads)
    return Encoder(config, Weights(raw))


def loaded_encoder(encoder: Encoder, kind: KVKind, tokens_per_step: int) -> LoadedExecutor:
    def with_pool(pool: Pool, context_tokens: int | None = None, /) -> EncoderExecutor:
        return EncoderExecutor(encoder, tokens_per_step, context_tokens)

    return LoadedExecutor(kind, with_pool)


class EncoderExecutor:
    steps_ahead = 1
    samples_on_host = True
    draft_rows_max = 0
    row_cost = 0.0

    def __init__(self, encoder: Encoder, tokens_at_once: int, context_tokens: int | None = None) -> None:
        """`tokens_at_once`: prompts that end in one step are computed in runs of at most that many tokens, or one by one."""
        device = encoder.device
        self.name = "torch" if device.type == "cpu" else f"torch ({device.type})"
        self.arithmetic = f"torch encoder {TORCH} {torch.__version__} {machine_of(device)}"
        self.config: EncoderConfig = encoder.config
        self._encoder = encoder
        self._tokens_at_once = tokens_at_once
        self._longest = min(context_tokens or encoder.config.context_tokens_max, encoder.config.context_tokens_max) - 1
        self._advance: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Runs the longest input once on a GPU, so that the memory profile includes it."""
        if self._encoder.device.type != "cpu":
            self._states([np.zeros(self._longest, np.int32)])

    def send_tables(self, sequences: InputBatch) -> None:
        """There is nothing to send: prompts are computed as a whole, without blocks."""

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Computed:
        self._advance()
        sampled = Sampled(np.zeros(len(batch.due), np.int64))
        due, pools = np.flatnonzero(batch.due).tolist(), dict(sampling.pools)
        prompts = {place: self._prompt(sampling, int(sampling.slots[place])) for place in due}
        sampled.failed = {place: TOO_LONG for place, prompt in prompts.items() if len(prompt) >= self.config.context_tokens_max}
        fit = sorted(prompts.keys() - sampled.failed.keys(), key=lambda place: (len(prompts[place]), place))
        for run in _runs(fit, prompts, self._tokens_at_once):
            states = dict(zip(run, self._states([prompts[place] for place in run]), strict=True))
            pooled = {place: (states[place], pools[place]) for place in run if place in pools}
            sampled.failed.update((place, GENERATES_NOTHING) for place in run if place not in pools)
            for answers in (self._vectors(pooled), self._logits(pooled)):
                for place, answer in answers.items():
                    if isinstance(answer, Failure):
                        sampled.failed[place] = answer
                    else:
                        sampled.embeddings[place] = answer
        self._advance()
        return Computed(sampled)

    def collect(self, launched: Launched) -> Sampled:
        assert type(launched) is Computed
        return launched.sampled

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = self._encoder.on_layer = word.advance

    def close(self) -> None:
        """Nothing to release: the pool holds nothing."""

    def _prompt(self, sampling: SamplingBatch, slot: int) -> Int32s:
        sequences = sampling.sequences
        return sequences.tokens[slot, : sequences.prompt_tokens[slot]]

    @torch.inference_mode()
    def _states(self, prompts: Sequence[Int32s]) -> tuple[Tensor, ...]:
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.from_numpy(np.concatenate(prompts)).to(self._encoder.device)
        return torch.split(self._encoder.forward(ids, lengths), lengths)

    @torch.inference_mode()
    def _vectors(self, pooled: Mapping[int, Pooled]) -> dict[int, bytes | Failure]:
        """Vectors of prompts without requested classes, by batch index. One copy brings all vectors of a run to the host."""
        asked = {place: _pooled(states, pool.kind) for place, (states, pool) in pooled.items() if not pool.labels}
        if not asked:
            return {}
        as_bytes = unit_vector if self.config.normalised else _unchanged
        rows = torch.stack(list(asked.values())).cpu().numpy()
        return {place: as_bytes(row) if np.isfinite(row).all() else NOT_FINITE for place, row in zip(asked, rows, strict=True)}

    @torch.inference_mode()
    def _logits(self, pooled: Mapping[int, Pooled]) -> dict[int, bytes | Failure]:
        """Logits of prompts with requested classes, by batch index."""
        head, asked = self.config.head, {place: each for place, each in pooled.items() if each[1].labels}
        if head is None or not asked:
            return dict.fromkeys(asked, NO_SUCH_CLASS)
        states = torch.stack([_pooled(states, head.pooling) for states, _ in asked.values()]).to(self._encoder.dtype)
        rows, found = self._encoder.logits(states).double().cpu().numpy(), dict[int, bytes | Failure]()
        for row, (place, (_, pool)) in zip(rows, asked.items(), strict=True):
            if max(pool.labels) >= len(row):
                found[place] = NO_SUCH_CLASS
            else:
                found[place] = _unchanged(row[list(pool.labels)]) if np.isfinite(row).all() else NOT_FINITE
        return found


def _unchanged(row: NDArray[np.float64]) -> bytes:
    return row.astype("<f4").tobytes()


def _pooled(states: Tensor, kind: str) -> Tensor:
    """The pooled vector, [hidden_size], float64."""
    if kind == "mean":
        return states.double().mean(0)
    return states[0 if kind == "cls" else -1].double()


def _runs(places: Sequence[int], prompts: dict[int, Int32s], tokens_max: int) -> Iterator[list[int]]:
    """Places in order, in runs of at most `tokens_max` tokens; a longer prompt is a run by itself."""
    run: list[int] = []
    tokens = 0
    for place in places:
        if run and tokens + len(prompts[place]) > tokens_max:
            yield run
            run, tokens = [], 0
        run.append(place)
        tokens += len(prompts[place])
    if run:
        yield run
