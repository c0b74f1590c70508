"""Steps on the GPU by our kernels, launched before the previous tokens reach the host.

    launch    changed tables and sampling columns -> device; the batch -> device; the step; tokens -> pinned memory
    collect   the step's event has passed: tokens and failures from pinned memory

Nothing is read before that: penalties, bias, excluded tokens and log-probabilities are computed on the device (adjustments.py).
The host only supplies the excluded tokens of a step (step_rules.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from baton.config import WorkerConfig
from baton.kvpool.base import Pool
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVKind
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedModel
from baton.models.ranks import TensorCollective
from baton.protocol.progress import ProgressWord
from baton.worker.arithmetic import cuda_arithmetic
from baton.worker.arrays import Int64s
from baton.worker.attention.pool_tensors import device_tensor
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.draft_passes import GREEDY_BUCKETS, CudaDraftPasses
from baton.worker.cuda.graphs import DeviceSteps, GraphLaunch
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.libraries import library_versions
from baton.worker.cuda.loader import DeviceWeights
from baton.worker.cuda.pooled import pooled_rows, read_vectors
from baton.worker.cuda.read_logprobs import AskedPrompt, prompt_requests, read_prompts, read_sampled
from baton.worker.cuda.step_inputs import StepBatch, split_few_rows
from baton.worker.cuda.weights import random_weights, refuse_fp8, take_weights
from baton.worker.draft_rows import DraftRows
from baton.worker.drafters.model import ROWS_MAX as DRAFT_ROWS
from baton.worker.drafters.price import ROWS_MAX
from baton.worker.draws import NOT_FINITE_ID
from baton.worker.executors.base import Launched, LoadedExecutor, Sampled
from baton.worker.failure import NOT_FINITE, NOTHING_LEFT, Failure
from baton.worker.flat_batch import FlatBatch
from baton.worker.input_batch import InputBatch
from baton.worker.pooling import PromptPart
from baton.worker.sampling_batch import SamplingBatch
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.step_rules import bans_of, forced_masks, grammar_masks
from baton.worker.token_masks import masks_of

STEPS_AHEAD = 2


def load_cuda(
    opened: OpenedModel,
    settings: WorkerConfig,
    kind: KVKind,
    progress: Progress | None,
    collective: TensorCollective | None = None,
) -> LoadedExecutor:
    """Load the model on the GPU. `collective`: the other ranks, if `opened` is one rank's part."""
    config = opened.config
    fp8 = settings.quantization == "fp8"
    if fp8:
        refuse_fp8(config)
    with torch.inference_mode():
        if settings.load_format == "dummy":
            dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
            weights = random_weights(config, dtype, "cuda", fp8=fp8)
        else:
            raw = RawWeights(opened.weights, config, progress)
            with DeviceWeights(raw, settings.dtype, opened.files) as source:
                weights = take_weights(config, source.take, fp8=fp8, take_fp8=source.take_fp8, take_mxfp4=source.take_mxfp4)
            raw.close()

    def with_pool(pool: Pool, context_tokens: int | None = None, /) -> CudaExecutor:
        assert isinstance(pool, DevicePool)
        context = context_tokens or min(config.context_tokens_max, pool.blocks * pool.layout.block_size)
        drafts = 0 if settings.speculate == "none" else ROWS_MAX
        limits = StepLimits(rows=settings.tokens_per_step, sequences=settings.slots, context_tokens=context, drafts=drafts)
        with torch.inference_mode():
            given = (config, weights, device_tensor(pool), limits)
            step = DecoderStep(*given, deterministic=settings.deterministic, collective=collective)
            return CudaExecutor(DeviceSteps(step), torch.cuda.get_device_name())

    def drafting(pool: Pool, context_tokens: int, /) -> CudaDraftPasses:
        assert isinstance(pool, DevicePool)
        context = min(config.context_tokens_max, context_tokens)
        limits = StepLimits(rows=DRAFT_ROWS, sequences=settings.slots, context_tokens=context, greedy=True)
        with torch.inference_mode():
            step = DecoderStep(config, weights, device_tensor(pool), limits, deterministic=settings.deterministic)
            return CudaDraftPasses(DeviceSteps(step, GREEDY_BUCKETS, timed=True))

    return LoadedExecutor(kind, with_pool, drafting)


@dataclass(slots=True)
class CudaLaunched:
    device: GraphLaunch
    due: Int64s | None
    "Batch indices of the due sequences. None: all."
    starts: Int64s | None
    "First row of each sequence, in a step with prompts."
    sequences: int
    top_logprobs: tuple[int | None, ...] = ()
    "Number of top log-probabilities per sequence; empty: none requested."
    prompts: tuple[AskedPrompt, ...] = ()
    pooled: tuple[PromptPart, ...] = ()
    drafts: DraftRows | None = None

    def wait(self) -> None:
        self.device.done.synchronize()


class CudaExecutor:
    steps_ahead = STEPS_AHEAD
    samples_on_host = False
    row_cost = 0.02

    def __init__(self, steps: DeviceSteps, gpu: str) -> None:
        self._steps, self._step = steps, steps.step
        self.draft_rows_max = self._step.limits.drafts
        dtype = str(self._step.weights.embedding.dtype).removeprefix("torch.")
        fp8, deterministic = bool(self._step.weights.in_fp8()), self._step.deterministic
        self.name = f"cuda ({gpu}, {dtype}{' fp8' * fp8})"
        self.config = self._step.config
        self.arithmetic = cuda_arithmetic(gpu, library_versions(), dtype=dtype, fp8=fp8, deterministic=deterministic)
        self._advance: Callable[[], None] = lambda: None
        self._label_rows: dict[tuple[int, ...], NDArray[np.float64]] = {}
        "Rows of the output head by labels, cached."

    @torch.inference_mode()
    def prepare(self) -> None:
        self._steps.prepare()

    def send_tables(self, sequences: InputBatch) -> None:
        if not sequences.has_table_changes:
            return
        slots, places, blocks = sequences.take_table_changes()
        inside = places < self._step.tables.shape[1]  # blocks beyond the longest context are never read
        self._steps.write_tables(slots[inside], places[inside], blocks[inside])

    def launch(self, batch: FlatBatch, sampling: SamplingBatch) -> CudaLaunched:
        """Launches a step. The device may be idle, so values that only `collect` needs are computed behind the replay."""
        self._advance()
        self._write_changes(sampling)
        if batch.drafted is not None:
            return self._launch_drafts(DraftRows(batch, sampling, batch.drafted))
        spans, width = batch.spans, self.config.vocab_size
        bans, masks = None, None
        if sampling.excludes or sampling.forces:
            places = np.flatnonzero(batch.due)
            bans = bans_of(sampling, places)
            masks = masks_of({**grammar_masks(sampling, places, width), **forced_masks(sampling, places, width)}, places)
        prompts, prompt_rows = prompt_requests(batch, sampling) if sampling.asks_prompts else ((), None)
        pooled = tuple(sampling.prompt_parts(batch)) if sampling.pools else ()
        for part in pooled:
            if part.pool.labels:
                part.pool.project = partial(self._label_logits, part.pool.labels)
        step = StepBatch(
            *(batch.token_ids, spans.slots, spans.starts, spans.contexts, batch.due),
            outputs=sampling.sequences.output_counts(sampling.slots),
            draws=not sampling.plain or sampling.excludes,
            token_logprobs=sampling.token_logprobs,
            bans=bans,
            masks=masks,
            prompts=prompt_rows,
            pooled=pooled_rows(pooled) if pooled else None,
            of_prompt=self._of_prompt(batch, sampling),
        )
        device = self._steps.launch(step)
        due = None if batch.due.all() else np.flatnonzero(batch.due)
        top_logprobs = tuple(state.params.logprobs for state in sampling.states) if sampling.token_logprobs else ()
        starts = None if device.broken is None else spans.starts.copy()
        return CudaLaunched(device, due, starts, len(spans.slots), top_logprobs, prompts, pooled)

    def _launch_drafts(self, rows: DraftRows) -> CudaLaunched:
        """Launch a step with drafts as a decode step with a row per draft: the graphs are the same."""
        batch, layout, sampling, width = rows.batch, rows.layout, rows.sampling, self.config.vocab_size
        bans, masks = rows.rules(width) if sampling.excludes or sampling.forces else (None, None)
        tallies, draft_counts = rows.tallies(self._step.limits.sequences, width) if sampling.tallied else (None, None)
        step = StepBatch(
            *(batch.token_ids, layout.slots, layout.bounds, batch.positions, layout.due),
            # A sequence's own row is its last token, so the row at position p follows p + 1 tokens.
            outputs=batch.positions + 1 - sampling.sequences.prompt_tokens[layout.slots],
            draws=not sampling.plain or sampling.excludes,
            token_logprobs=sampling.token_logprobs,
            bans=bans,
            masks=masks,
            tallies=tallies,
            draft_counts=draft_counts,
        )
        device = self._steps.launch(step)
        top_logprobs = tuple(state.params.logprobs for state in sampling.states) if sampling.token_logprobs else ()
        return CudaLaunched(device, None, None, len(sampling.states), top_logprobs, drafts=rows)

    def _label_logits(self, labels: tuple[int, ...], state: NDArray[np.float64]) -> bytes:
        """Logits of the labels, from a state after the last norm. A prompt has a few labels; the head's kernels compute all
        tokens."""
        rows = self._label_rows.get(labels)
        if rows is None:
            self._label_rows.clear()  # the labels belong to the model, so another set is rare
            weights, of_ranks = self._step.weights, self._step.collective is not None
            # Each of several ranks has a part of the head. Labels are refused unless it is the embedding (opening.py).
            head = weights.embedding if of_ranks else weights.head
            found: NDArray[np.float64] = head[list(labels)].double().cpu().numpy()
            rows = self._label_rows[labels] = found
        return (rows @ state).astype("<f4").tobytes()

    def _of_prompt(self, batch: FlatBatch, sampling: SamplingBatch) -> Int64s | None:
        """Rows per sequence that are attended to as a prompt. In deterministic mode sampled tokens that are computed again
        (after a preemption or a worker loss) are attended to as before: row by row."""
        spans, deterministic = batch.spans, self._step.deterministic
        if len(batch.token_ids) == len(spans.slots) and not deterministic:
            return None
        counts = np.diff(spans.starts)
        if not deterministic:
            return split_few_rows(counts, spans.contexts, self._step.limits.sequences)
        left = sampling.sequences.prompt_tokens[spans.slots] - spans.contexts
        found: Int64s = np.clip(left, 0, counts)
        return found

    def collect(self, launched: Launched) -> Sampled:
        assert type(launched) is CudaLaunched
        launched.wait()
        self._advance()
        return _sampled(launched) if launched.drafts is None else _verified(launched, launched.drafts)

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance

    def close(self) -> None:
        self._steps.close()
        del self._steps, self._step

    def _write_changes(self, sampling: SamplingBatch) -> None:
        self.send_tables(sampling.sequences)
        if sampling.columns.has_changes:
            self._write_columns(sampling.columns)

    @torch.inference_mode()
    def _write_columns(self, columns: SamplingColumns) -> None:
        with self._steps.queueing():
            if columns.has_counted:
                self._step.adjustments.count(columns.take_counted())
            changed = columns.take_changed()
            if changed.size:
                self._step.columns.write(columns, changed)
                self._step.adjustments.write(columns, changed)


def _verified(launched: CudaLaunched, rows: DraftRows) -> Sampled:
    """The tokens up to the first that differs from its draft. The host knows them all, so it advances the sequences' states."""
    chosen = launched.device.tokens.numpy().astype(np.int64)
    failures: dict[int, Failure] = {}
    if chosen.min() < 0:
        failures = {row: _failure(int(chosen[row])) for row in np.flatnonzero(chosen < 0).tolist()}
    sampled = Sampled(np.zeros(launched.sequences, np.int64))
    last = rows.accept(chosen, failures, sampled)
    rows.consume(sampled)
    if launched.device.logprob_words is not None:
        words, top_logprobs = launched.device.logprob_words.numpy(), launched.top_logprobs
        by_row = read_sampled(
            words, chosen, np.arange(len(chosen)), [top_logprobs[place] for place in rows.places.tolist()], failures
        )
        for place, row in enumerate(last.tolist()):
            if row in by_row:
                sampled.logprobs[place] = by_row[row]
                earlier = [by_row[other] for other in range(row - len(sampled.accepted.get(place, ())), row)]
                if earlier:
                    sampled.accepted_logprobs[place] = earlier
    return sampled


def _failure(token: int) -> Failure:
    return NOT_FINITE if token == NOT_FINITE_ID else NOTHING_LEFT


def _sampled(launched: CudaLaunched) -> Sampled:
    """The tokens and failures of a step without drafts, from the device's results."""
    chosen = launched.device.tokens.numpy().astype(np.int64)
    places = launched.due
    failed: dict[int, Failure] = {}
    if launched.device.broken is not None and launched.starts is not None:
        broken = launched.device.broken.numpy() != 0
        if broken.any():
            not_finite = np.logical_or.reduceat(broken, launched.starts[:-1])
            failed = dict.fromkeys(np.flatnonzero(not_finite).tolist(), NOT_FINITE)
    if places is None:
        tokens = chosen
    else:
        tokens = np.zeros(launched.sequences, np.int64)
        tokens[places] = chosen
    if chosen.size and chosen.min() < 0:
        for row in np.flatnonzero(chosen < 0).tolist():
            place = row if places is None else int(places[row])
            failed.setdefault(place, _failure(int(chosen[row])))
    sampled = Sampled(tokens, failed)
    if launched.device.logprob_words is not None:
        due = np.arange(launched.sequences) if places is None else places
        sampled.logprobs = read_sampled(launched.device.logprob_words.numpy(), chosen, due, launched.top_logprobs, failed)
    if launched.device.prompts is not None:
        sampled.prompts = read_prompts(launched.device.prompts.numpy(), launched.prompts, failed)
    if launched.device.pooled is not None:
        sampled.embeddings = read_vectors(launched.device.pooled.numpy(), launched.pooled, failed)
    return sampled
