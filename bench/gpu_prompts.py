"""Section of bench/gpu.py: what it costs that several prompts share the steps of prefill.

While fewer than `prompts_at_once` prompts of a class are being computed, each leaves half of a step to those that wait
(core/engine/sharing.py), so a short prompt does not wait for long ones. That replaces a default for `chunk_tokens_max`, and may
make prefill at most 3 % slower. The real scheduler plans the steps, and the real worker computes them, in this process: prompts
of one size that all wait at the start, one token each. The two settings take turns.

tok_s_1, tok_s_4    prompt tokens per second with prompts one after the other, and with four at once; the median
steps_1, steps_4    how many steps that took
slower_percent      by how much four at once are slower: the median of the ratios of neighbouring runs
goal                passed, or missed
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from baton.config import InstanceConfig, KVConfig, SchedulerConfig, WorkerConfig
from baton.core.effects import RunStep
from baton.core.events import Event, StepDone, Submit, WorkerReady
from baton.core.instance import Instance
from baton.models.config import ModelConfig
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import StepPlan
from baton.worker.in_flight_step import InFlightStep

if TYPE_CHECKING:
    from baton.worker.model_runner import ModelRunner

AT_ONCE = (1, SchedulerConfig().prompts_at_once)
SLOWER_PERCENT_MAX = 3.0
LOADS = ((1024, 48), (4096, 12), (16_384, 4))
"""Tokens of a prompt, and how many wait: each load is one to two seconds of an H200."""
TURNS = 3
BLOCK_SIZE, SLOTS, TOKENS_PER_STEP = 16, 256, 8192
"""As a server of this size of GPU has them (config/device_defaults.py)."""
Row = dict[str, object]


class PrefillRun:
    """Prompts from a full queue to their tokens."""

    def __init__(
        self, runner: ModelRunner, prompts: list[list[int]], at_once: int, tokens_per_step: int = TOKENS_PER_STEP
    ) -> None:
        slots = min(SLOTS, tokens_per_step)
        scheduler = SchedulerConfig(slots=slots, tokens_per_step=tokens_per_step, prompts_at_once=at_once)
        kv = KVConfig(blocks=runner.pool.blocks, block_size=runner.pool.layout.block_size)
        self.instance = Instance(InstanceConfig(kv=kv, scheduler=scheduler))
        self.runner, self.prompts = runner, prompts
        self.plans: deque[StepPlan] = deque()
        self.in_flight: deque[InFlightStep] = deque()
        self.ended: list[str] = []
        self.steps = 0
        runner.clear()

    def seconds(self) -> float:
        """Until all prompts have their token. They are in the queue before the worker is ready, so the first step is full."""
        for number, prompt in enumerate(self.prompts):
            request = GenerateRequest(id=RequestId(str(number)), prompt=tuple(prompt), sampling=SamplingParams(max_tokens=1))
            self._dispatch(Submit(request))
        began = time.perf_counter()
        self._dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(1)))
        while self.plans or self.in_flight:
            while self.plans and not self.runner.must_wait(self.plans[0]):
                self.in_flight.append(self.runner.submit(self.plans.popleft()))
                self.steps += 1
            self._dispatch(StepDone(self.runner.collect(self.in_flight.popleft())))
        took = time.perf_counter() - began
        assert len(self.ended) == len(self.prompts), f"{len(self.ended)} of {len(self.prompts)} prompts have ended"
        return took

    def _dispatch(self, event: Event) -> None:
        for effect in self.instance.handle(event, Instant(time.perf_counter())):
            match effect:
                case RunStep(plan):
                    self.plans.append(plan)
                case Emit(ended=ended):
                    self.ended += [end.request for end in ended]


def load_rows(runner: ModelRunner, vocabulary: int, tokens: int, count: int, turns: int = TURNS, **more: int) -> Row:
    """The two settings in turns, after one of each that is not counted. more: of PrefillRun."""
    rates: dict[int, list[float]] = {at_once: [] for at_once in AT_ONCE}
    steps: dict[int, int] = {}
    for turn in range(1 + turns):
        rng = np.random.default_rng(turn)
        prompts = [rng.integers(2, vocabulary, tokens).tolist() for _ in range(count)]
        for at_once in AT_ONCE if turn % 2 else reversed(AT_ONCE):
            run = PrefillRun(runner, prompts, at_once, **more)
            rate = tokens * count / run.seconds()
            steps[at_once] = run.steps
            if turn:
                rates[at_once].append(rate)
    one, several = AT_ONCE
    slower = 100 * (statistics.median(a / b for a, b in zip(rates[one], rates[several], strict=True)) - 1)
    return {
        "tokens": tokens,
        "prompts": count,
        **{f"tok_s_{at_once}": statistics.median(each) for at_once, each in rates.items()},
        **{f"steps_{at_once}": steps[at_once] for at_once in AT_ONCE},
        "slower_percent": slower,
        "goal": f"{'passed' if slower <= SLOWER_PERCENT_MAX else 'missed'} (at most {SLOWER_PERCENT_MAX:g} % slower)",
    }


def prompts(config: ModelConfig, options: argparse.Namespace) -> Iterator[Row]:
    began = time.perf_counter()
    runner = gpu_runner(config)
    yield {"ready_after_s": time.perf_counter() - began}
    for tokens, count in LOADS:
        yield load_rows(runner, config.vocab_size, tokens, count)
    runner.close()


def gpu_runner(config: ModelConfig) -> ModelRunner:
    from baton.models.loaders.dummy import DummyWeights
    from baton.models.open import OpenedModel
    from baton.worker.kv_layout import kv_layout
    from baton.worker.model_runner import ModelRunner
    from baton.worker.platforms.cuda import CudaPlatform

    platform, context = CudaPlatform(), max(tokens for tokens, _ in LOADS) + BLOCK_SIZE
    settings = WorkerConfig(
        device="cuda", dtype="bfloat16", quantization="none", load_format="dummy", slots=SLOTS, tokens_per_step=TOKENS_PER_STEP,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    loaded = platform.load(OpenedModel(Path(), config, DummyWeights(config)), settings)
    blocks = max(tokens * count for tokens, count in LOADS) // BLOCK_SIZE + 2 * SLOTS
    pool = platform.create_pool(kv_layout(config, BLOCK_SIZE, loaded.kv), blocks)
    executor = loaded.with_pool(pool, context)
    executor.prepare()  # with all graphs, as in a server: the last rows of prompts are small steps
    return ModelRunner(executor, pool, slots=SLOTS)
