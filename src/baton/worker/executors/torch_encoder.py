"""An Executor of an encoder: it computes a prompt as a whole in the step in which its last tokens are due, and keeps nothing.

A chunk that is not the last computes nothing. With the last one all tokens of the prompt come from its slot, so chunks, cached
prefixes, preemption and replay change no result. Blocks of the pool hold nothing: the scheduler counts with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
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
from baton.worker.pooling import PromptPool, of_length_one
from baton.worker.sampling_batch import SamplingBatch

GENERATES_NOTHING = Failure("the model is an encoder: it gives vectors or classes and generates no text")
NO_SUCH_CLASS = Failure("the model has no class of this number")


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
        """On a GPU the longest input runs once, so that the memory profile knows what it needs."""
        if self._encoder.device.type != "cpu":
            self._states([np.zeros(self._longest, np.int32)])

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> Computed:
        self._advance()
        sampled = Sampled(np.zeros(len(batch.due), np.int64))
        due, pools = np.flatnonzero(batch.due).tolist(), dict(sampling.pools)
        prompts = {place: self._prompt(sampling, int(sampling.slots[place])) for place in due}
        for run in _runs(sorted(due, key=lambda place: len(prompts[place])), prompts, self._tokens_at_once):
            for place, states in zip(run, self._states([prompts[place] for place in run]), strict=True):
                answer = self._answer(states, pools[place]) if place in pools else GENERATES_NOTHING
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
        """The pool holds nothing."""

    def _prompt(self, sampling: SamplingBatch, slot: int) -> Int32s:
        sequences = sampling.sequences
        return sequences.tokens[slot, : sequences.prompt_tokens[slot]]

    @torch.inference_mode()
    def _states(self, prompts: Sequence[Int32s]) -> tuple[Tensor, ...]:
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.from_numpy(np.concatenate(prompts)).to(self._encoder.device)
        return torch.split(self._encoder.forward(ids, lengths), lengths)

    @torch.inference_mode()
    def _answer(self, states: Tensor, pool: PromptPool) -> bytes | Failure:
        head = self.config.head
        if not pool.labels:
            vector = _pooled(states, pool.kind).cpu().numpy()
            if not np.isfinite(vector).all():
                return NOT_FINITE
            return of_length_one(vector) if self.config.normalised else vector.astype("<f4").tobytes()
        if head is None or max(pool.labels) >= len(head.labels):
            return NO_SUCH_CLASS
        pooled = _pooled(states, head.pooling).to(states.dtype)
        logits = self._encoder.logits(pooled[None])[0, list(pool.labels)].float().cpu().numpy()
        return logits.astype("<f4").tobytes() if np.isfinite(logits).all() else NOT_FINITE


def _pooled(states: Tensor, kind: str) -> Tensor:
    """[hidden_size], float64."""
    if kind == "mean":
        return states.double().mean(0)
    return states[0 if kind == "cls" else -1].double()


def _runs(places: Sequence[int], prompts: dict[int, Int32s], tokens_max: int) -> Iterator[list[int]]:
    """Places in order, cut where the next prompt would make a run of more than so many tokens."""
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
