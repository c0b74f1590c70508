"""Steps on the device, launched without waiting: decode steps as recorded graphs, one per padded batch size.

host     pack | copy, replay, copy back |  pack | copy, replay, ...            launch() returns when all that is queued
device        |--------- step n --------|--------- step n + 1 ---------|
host                                     collect(n): its event has passed

Step n + 1 may be launched before the host has the tokens of step n: rows whose token is FEEDBACK read it on the device. Inputs
are copied in the order of the stream, so one buffer on the device serves all steps; the host has a ring of pinned ones. Steps
with prompts are launched call by call; with few rows their layers are graphs too (mixed_graphs.py).

A step with drafts is launched when the tokens before it are known, and the device is idle until the graph is replayed. So a
decode step makes few calls before the replay: places and slices are cached by size, and what the buffers need was waited for
before (docs/internals/notes/gpu-runs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.cuda.adjustments import sent
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.kernels.logprobs import WORDS
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.mixed_graphs import MixedGraphs
from baton.worker.cuda.step_inputs import (
    NO_PADDING,
    DecodeInputs,
    PromptRows,
    StepBatch,
    StepInputs,
    decode_views,
    ints_needed,
    mixed_views,
    pack_decode,
    pack_mixed,
)

RING = 4
"""Pinned buffers: more than the steps that are ever launched and not collected."""
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


ROWS_TO_WARM_UP = (2, 20, 40, 100, 200)
"""Row counts of steps with prompts: one for each choice of kernels (skinny_gemm, fixed_gemm)."""


def rows_to_warm_up(limits: StepLimits) -> list[int]:
    """Row counts to warm up, each as one prompt that fits the context."""
    most = min(limits.rows, limits.context_tokens)
    return [*(rows for rows in ROWS_TO_WARM_UP if rows < most), most]


@dataclass(slots=True)
class GraphLaunch:
    done: torch.cuda.Event
    tokens: Tensor
    "int32 [due] in pinned memory, valid after `done` and until RING more steps are launched."
    broken: Tensor | None
    "int32 [rows], valid as `tokens` is; None for a decode step."
    logprob_words: Tensor | None = None
    "int32 [due, logprobs.WORDS], valid as `tokens` is; None: not requested."
    prompts: Tensor | None = None
    "int32 [prompt rows, logprobs.WORDS], valid as `tokens` is."
    pooled: Tensor | None = None
    "int64 [StepBatch.pooled, hidden], valid from `done` on, without expiry; None: not requested."


class _Staged(NamedTuple):
    """The inputs of decode steps of one bucket in a pinned buffer, and slices of both ends of their copy."""

    inputs: DecodeInputs
    host: Tensor
    device: Tensor


class _Pinned:
    """Pinned buffers of one step in flight. Created outside of inference mode: a launch then need not enter it to write to
    them."""

    def __init__(self, ints: int, rows: int, sequences: int, *, timed: bool) -> None:
        self.inputs = torch.empty(ints, dtype=torch.int32, pin_memory=True)
        self.packed: NDArray[np.int32] = self.inputs.numpy()
        self.tokens = torch.empty(sequences, dtype=torch.int32, pin_memory=True)
        self.broken = torch.empty(rows, dtype=torch.int32, pin_memory=True)
        self.logprob_words = torch.empty(sequences, WORDS, dtype=torch.int32, pin_memory=True)
        self.prompts = torch.empty(rows, WORDS, dtype=torch.int32, pin_memory=True)
        self.done = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self._staged: dict[int, _Staged] = {}

    def staged(self, bucket: int, device: Tensor) -> _Staged:
        """`device`: the memory to which inputs are copied."""
        found = self._staged.get(bucket)
        if found is None:
            inputs = DecodeInputs(bucket, self.packed)
            found = self._staged[bucket] = _Staged(inputs, self.inputs[: inputs.size], device[: inputs.size])
        return found


class _OnStream:
    """As torch.cuda.stream, without asking for the current stream, which is the default one: not to be nested."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._default = stream, torch.cuda.default_stream()

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        torch.cuda.set_stream(self._default)


class DeviceSteps:
    def __init__(self, step: DecoderStep, buckets: Sequence[int] = BUCKETS, *, timed: bool = False) -> None:
        """timed: the time between the ends of two steps can be measured (torch.cuda.Event)."""
        limits = step.limits
        self.step = step
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # In deterministic mode 8 rows are faster than 1 (measured), and padding changes no bits.
        least = 8 if step.deterministic else 1
        fitting = [bucket for bucket in buckets if least <= bucket < limits.sampled]
        self.buckets = [*fitting, limits.sampled]
        self._bucket_of = [next(bucket for bucket in self.buckets if bucket >= rows) for rows in range(limits.sampled + 1)]
        "The smallest bucket for a number of rows."
        self._records = step.collective is None or bool(getattr(step.collective, "in_graphs", False))
        "Whether steps can be recorded: a collective that needs the host cannot."
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}
        "Recorded graphs by bucket, by whether the step draws, and whether its sequences are even."
        self._memory: Any = None  # the graphs' shared memory pool; its torch type is private
        ints = ints_needed(limits.rows, limits.sampled, step.rows_per_tile)
        with torch.inference_mode(False):
            self._inputs = torch.zeros(ints, dtype=torch.int32, device="cuda")
            self._ring = [_Pinned(ints, limits.rows, limits.sampled, timed=timed) for _ in range(RING)]
        self._mixed = MixedGraphs(step, self._inputs)
        self._on_stream = _OnStream(self.stream)
        self._next = 0

    def queueing(self) -> _OnStream:
        """Runs a block of work in stream order, between the steps launched before and after it."""
        return self._on_stream

    def close(self) -> None:
        """Waits for all steps, and releases the memory of the graphs."""
        torch.cuda.synchronize()
        self._graphs.clear()
        self._mixed.clear()
        torch.cuda.empty_cache()

    def prepare(self) -> None:
        """Records the graphs of decode steps, and compiles steps with prompts: on separate memory, not in the pool."""
        self.capture()
        pool = self.step.pool
        self.step.pool = torch.zeros_like(pool[:1])
        self.warm_up_prompts()
        self.step.pool = pool

    def capture(self) -> None:
        """Compiles and records all replayed steps, largest first: smaller steps then reuse the memory."""
        if not self._records:
            return
        self._mixed.capture(self._record)
        for bucket in reversed(self.buckets):
            for draws in (False,) if self.step.limits.greedy else (False, True):
                for even in (False, True):
                    self._capture(bucket, draws, even)

    def warm_up_prompts(self) -> None:
        """Compiles kernels that only steps with prompts use, so that no request waits for a compiler. Writes to the pool."""
        for rows in rows_to_warm_up(self.step.limits):
            self._warm_up(rows)

    def _warm_up(self, rows: int) -> None:
        greedy = self.step.limits.greedy
        batch = StepBatch(
            token_ids=np.zeros(rows, np.int32),
            slots=np.zeros(1, np.int32),
            starts=np.array([0, rows]),
            contexts=np.zeros(1, np.int64),
            due=np.ones(1, np.bool_),
            outputs=np.zeros(1, np.int32),
            draws=not greedy,
            pooled=None if greedy else np.array([[0, rows]], np.int32),
        )
        self.launch(batch, recorded=False).done.synchronize()

    def launch(self, batch: StepBatch, *, recorded: bool = True) -> GraphLaunch:
        """Launches a step. recorded: a graph may be replayed. Graphs are bound to the pool of their recording."""
        limits = self.step.limits
        if len(batch.token_ids) > limits.rows or len(batch.slots) > limits.sampled:
            raise ValueError(f"{len(batch.token_ids)} rows of {len(batch.slots)} sequences are more than {limits}")
        pinned = self._ring[self._next]
        self._next = (self._next + 1) % RING
        try:
            with self._on_stream:
                return self._queue(batch, pinned, recorded=recorded)
        finally:
            # The buffers of the next launch, of RING - 1 steps ago: already collected. Waited for here and not before they are
            # written, because the device computes now, and may be idle then.
            self._ring[self._next].done.synchronize()

    def _queue(self, batch: StepBatch, pinned: _Pinned, *, recorded: bool) -> GraphLaunch:
        if batch.draws:
            self.step.adjustments.write_rules(batch.bans, batch.masks)
        if batch.draft_counts is not None:
            self.step.adjustments.write_draft_counts(batch.draft_counts)
        decodes = batch.decodes
        due = self._queue_decode(batch, pinned) if decodes else self._queue_mixed(batch, pinned, recorded=recorded)
        tokens, broken = pinned.tokens[:due], None
        tokens.copy_(self.step.tokens(due), non_blocking=True)
        logprob_words = self._queue_logprobs(pinned, due) if batch.token_logprobs else None
        prompts = self._queue_prompts(pinned, batch.prompts) if batch.prompts is not None else None
        pooled = self._queue_pooled(batch.pooled) if batch.pooled is not None else None
        if not decodes:
            broken = pinned.broken[: len(batch.token_ids)]
            broken.copy_(self.step.broken(len(batch.token_ids)), non_blocking=True)
        pinned.done.record(self.stream)
        return GraphLaunch(pinned.done, tokens, broken, logprob_words, prompts, pooled)

    @torch.inference_mode()
    def write_tables(self, slots: NDArray[np.integer], places: NDArray[np.integer], blocks: NDArray[np.integer]) -> None:
        """tables[slot, place] = block, for all later steps."""
        with self._on_stream:
            width = self.step.tables.shape[1]
            entries = np.stack((np.asarray(slots, np.int64) * width + places, np.asarray(blocks, np.int64)))
            on_device = torch.from_numpy(entries).pin_memory().to("cuda", non_blocking=True)
            self.step.tables.view(-1).index_copy_(0, on_device[0], on_device[1].to(torch.int32))

    def _queue_decode(self, batch: StepBatch, pinned: _Pinned) -> int:
        sequences = len(batch.slots)
        staged = pinned.staged(self._bucket_of[sequences], self._inputs)
        kind = (staged.inputs.bucket, batch.draws, batch.even)
        if self._records and kind not in self._graphs:
            self._capture(*kind)
        staged.inputs.write(batch, self.step.config.kv_heads, fixed=self.step.deterministic)
        staged.device.copy_(staged.host, non_blocking=True)
        if self._records:
            self._graphs[kind].replay()
        else:
            self._run_decode(decode_views(staged.inputs.packing, self._inputs), draws=batch.draws, even=batch.even)
        return sequences

    @torch.inference_mode()
    def _run_decode(self, inputs: StepInputs, *, draws: bool, even: bool) -> None:
        self.step.run(inputs, draws=draws, even=even)

    @torch.inference_mode()
    def _queue_mixed(self, batch: StepBatch, pinned: _Pinned, *, recorded: bool) -> int:
        step = self.step
        kv_heads, padding = step.config.kv_heads, self._mixed.padding_for(batch) if recorded else None
        packing = pack_mixed(
            *(batch, pinned.packed, kv_heads, step.rows_per_tile),
            fixed=step.deterministic,
            padding=padding or NO_PADDING,
        )
        self._inputs[: packing.size].copy_(pinned.inputs[: packing.size], non_blocking=True)
        inputs = mixed_views(packing, self._inputs)
        if padding is None:
            step.run_layers(inputs, even=False)
        else:
            self._mixed.replay(padding)
        step.choose_tokens(inputs, draws=batch.draws)
        return int(batch.due.sum())

    def _queue_logprobs(self, pinned: _Pinned, due: int) -> Tensor:
        logprob_words = pinned.logprob_words[:due]
        return logprob_words.copy_(self.step.adjustments.logprob_words[:due], non_blocking=True)

    @torch.inference_mode()
    def _queue_prompts(self, pinned: _Pinned, asked: PromptRows) -> Tensor:
        rows, tokens, wanted = sent(np.stack((asked.rows, asked.tokens, asked.top_logprobs)), self._inputs.device)
        self.step.write_prompt_logprobs(rows, tokens, wanted)
        prompts = pinned.prompts[: len(rows)]
        return prompts.copy_(self.step.adjustments.prompt_words[: len(rows)], non_blocking=True)

    @torch.inference_mode()
    def _queue_pooled(self, ranges: NDArray[np.int32]) -> Tensor:
        """Queues the copy of pooled rows. They are rare and large, so they have no place in the ring."""
        sums = self.step.pool_rows(sent(ranges, self._inputs.device))
        pooled = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        return pooled.copy_(sums, non_blocking=True)

    @torch.inference_mode()
    def _capture(self, bucket: int, draws: bool, even: bool) -> None:
        empty = np.zeros(0, np.int32)
        batch = StepBatch(empty, empty, np.zeros(1, np.int32), empty, np.zeros(0, np.bool_), empty)
        run = np.empty(len(self._inputs), np.int32)
        # All rows are padding: nothing is written to the pool.
        packing = pack_decode(batch, bucket, run, self.step.config.kv_heads, fixed=self.step.deterministic)
        inputs: StepInputs = decode_views(packing, self._inputs)
        self.stream.synchronize()
        self._inputs[: packing.size].copy_(torch.from_numpy(run[: packing.size]))
        self._graphs[bucket, draws, even] = self._record(lambda: self.step.run(inputs, draws=draws, even=even))

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            run()  # this run compiles, and lets cuBLAS allocate its workspace outside of the graph
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self.stream):
            run()
        self._memory = graph.pool()
        return graph
