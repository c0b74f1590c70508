"""Steps on the GPU by our kernels, launched ahead of what the host knows.

    launch    what changed in tables and sampling columns -> device; the batch -> device; the step; tokens -> pinned memory
    collect   the step's event has passed: tokens and failures from pinned memory

Rows that are sampled on the host (SequenceSampling.on_host) make launch wait: their logits are copied here, sampled by
sampler.py, and their tokens written back for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from baton.config import WorkerConfig
from baton.kvpool.base import Pool
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVKind
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Floats, Int64s
from baton.worker.attention.pool_tensors import device_tensor
from baton.worker.cuda.columns import write_columns
from baton.worker.cuda.decoder_step import DecoderStep, StepLimits
from baton.worker.cuda.graphs import DeviceSteps
from baton.worker.cuda.graphs import Launched as DeviceLaunched
from baton.worker.cuda.loader import DeviceWeights
from baton.worker.cuda.step_inputs import StepBatch
from baton.worker.cuda.weights import random_weights, take_weights
from baton.worker.draws import NOT_FINITE_ID
from baton.worker.executors.base import Launched, LoadedExecutor, Sampled
from baton.worker.executors.host_logprobs import describe_prompts
from baton.worker.flat_batch import FlatBatch
from baton.worker.sampler import NOT_FINITE, SampleRow, sample
from baton.worker.sampling_batch import SamplingBatch

STEPS_AHEAD = 2


def load_cuda(opened: OpenedModel, settings: WorkerConfig, kind: KVKind, progress: Progress | None) -> LoadedExecutor:
    config = opened.config
    with torch.inference_mode():
        if settings.load_format == "dummy":
            weights = random_weights(config, torch.float32 if settings.dtype == "float32" else torch.bfloat16, "cuda")
        else:
            raw = RawWeights(opened.weights, config, progress)
            with DeviceWeights(raw, settings.dtype) as source:
                weights = take_weights(config, source.take)
            raw.close()

    def with_pool(pool: Pool) -> CudaExecutor:
        assert isinstance(pool, DevicePool)
        context = min(settings.context_tokens_max or config.context_tokens_max, pool.blocks * pool.layout.block_size)
        limits = StepLimits(rows=settings.tokens_per_step, sequences=settings.slots, context_tokens=context)
        with torch.inference_mode():
            step = DecoderStep(config, weights, device_tensor(pool), limits, deterministic=settings.deterministic)
            return CudaExecutor(DeviceSteps(step), torch.cuda.get_device_name())

    return LoadedExecutor(kind, with_pool)


@dataclass(slots=True)
class CudaLaunched:
    device: DeviceLaunched
    due: Int64s | None
    "Places of the sequences that get a token. None: all."
    starts: Int64s | None
    "Where the rows of each sequence begin, of a step with prompts."
    sequences: int
    on_host: Sampled | None = None
    "What the host has sampled already."

    def wait(self) -> None:
        self.device.done.synchronize()


class CudaExecutor:
    steps_ahead = STEPS_AHEAD

    def __init__(self, steps: DeviceSteps, gpu: str) -> None:
        self._steps, self._step = steps, steps.step
        dtype = str(self._step.weights.embedding.dtype).removeprefix("torch.")
        self.name = f"cuda ({gpu}, {dtype})"
        self.arithmetic = f"cuda {torch.__version__} {gpu}{' deterministic' if self._step.deterministic else ''}"
        self.config = self._step.config
        self._advance: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records the graphs of decode steps, and compiles steps with prompts: on memory of their own, not in the pool."""
        self._steps.capture()
        pool = self._step.pool
        self._step.pool = torch.zeros_like(pool[:1])
        self._steps.warm_up_prompts()
        self._step.pool = pool

    @torch.inference_mode()
    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> CudaLaunched:
        self._advance()
        self._write_changes(sampling)
        spans, sequences = batch.spans, len(batch.spans.slots)
        outputs = sampling.sequences.output_counts(sampling.slots)
        step = StepBatch(batch.token_ids, spans.slots, spans.starts, spans.contexts, batch.due, outputs, sampling.draws)
        device = self._steps.launch(step)
        due = None if batch.due.all() else np.flatnonzero(batch.due)
        launched = CudaLaunched(device, due, None if device.broken is None else spans.starts.copy(), sequences)
        if sampling.on_host:
            launched.on_host = self._sample_on_host(batch, sampling, launched)
        return launched

    def collect(self, launched: Launched) -> Sampled:
        assert type(launched) is CudaLaunched
        launched.wait()
        self._advance()
        return launched.on_host or _sampled(launched)

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance

    def close(self) -> None:
        self._steps.close()
        del self._steps, self._step

    def _write_changes(self, sampling: SamplingBatch) -> None:
        slots, places, blocks = sampling.sequences.take_table_changes()
        if slots.size:
            inside = places < self._step.tables.shape[1]  # a block beyond the longest context is never read
            self._steps.write_tables(slots[inside], places[inside], blocks[inside])
        changed = sampling.columns.take_changed()
        if changed.size:
            with self._steps.queueing():
                write_columns(self._step.sampling, sampling.columns, changed)

    # Rows that are sampled on the host

    def _sample_on_host(self, batch: FlatBatch, sampling: SamplingBatch, launched: CudaLaunched) -> Sampled:
        launched.wait()
        sampled = _sampled(launched)
        if sampling.asks_prompts:
            sampled.prompts = describe_prompts(batch, sampling, sampled.failed, self._logits_of_rows)
        places = np.arange(launched.sequences) if launched.due is None else launched.due
        rows = [row for row, place in enumerate(places.tolist()) if sampling.states[place].on_host]
        if rows:
            self._choose_on_host(sampling, places[rows], self._logits(rows), sampled)
        return sampled

    def _choose_on_host(self, sampling: SamplingBatch, places: Int64s, logits: Floats, sampled: Sampled) -> None:
        slots, outputs = sampling.slots[places], sampling.sequences.outputs
        rows = [
            SampleRow(sampling.states[place], outputs(slot))
            for place, slot in zip(places.tolist(), slots.tolist(), strict=True)
        ]
        chosen = sample(logits, rows, sampling.draws_of(slots))
        sampled.tokens[places] = chosen.tokens
        for row, place in enumerate(places.tolist()):
            if row in chosen.failed:
                sampled.failed[place] = chosen.failed[row]
            elif place in sampled.failed:
                continue
            elif row in chosen.logprobs:
                sampled.logprobs[place] = chosen.logprobs[row]
        last_tokens = self._step.last_tokens
        with self._steps.queueing():
            at, tokens = (torch.from_numpy(column).to(last_tokens.device) for column in (slots, chosen.tokens))
            last_tokens.index_copy_(0, at, tokens.to(torch.int32))

    def _logits(self, rows: list[int]) -> Floats:
        """Of these rows of the last step's logits."""
        with self._steps.queueing():
            found = self._step.logits(max(rows) + 1)[rows].cpu()
        logits: Floats = found.numpy()
        return logits

    def _logits_of_rows(self, begin: int, end: int) -> Floats:
        """Of any rows of the last step's batch."""
        with self._steps.queueing():
            found = self._step.row_logits(begin, end).cpu()
        logits: Floats = found.numpy()
        return logits


def _sampled(launched: CudaLaunched) -> Sampled:
    """As the device has sampled."""
    chosen = launched.device.tokens.numpy().astype(np.int64)
    places = launched.due
    failed: dict[int, str] = {}
    if launched.device.broken is not None and launched.starts is not None:
        broken = launched.device.broken.numpy() != 0
        if broken.any():
            sick = np.logical_or.reduceat(broken, launched.starts[:-1])
            failed = dict.fromkeys(np.flatnonzero(sick).tolist(), NOT_FINITE)
    if places is None:
        tokens = chosen
    else:
        tokens = np.zeros(launched.sequences, np.int64)
        tokens[places] = chosen
    if chosen.size and chosen.min() == NOT_FINITE_ID:
        wrong = np.flatnonzero(chosen == NOT_FINITE_ID)
        failed.update(dict.fromkeys((wrong if places is None else places[wrong]).tolist(), NOT_FINITE))
    return Sampled(tokens, failed)
