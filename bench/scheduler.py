"""Cost of the core: plan + absorb of one step, at 1, 64 and 256 running with 0 and 10,000 waiting; a burst; a lost worker.

    python bench/scheduler.py [--steps N] [--json]

The worker is a stub that answers every plan with a constant token; only `Instance.handle` is timed. Every line is the
median over steps in which all sequences decode, with block growth and publishing to the prefix cache included.
"""

from __future__ import annotations

import argparse
import json
from statistics import median, quantiles
from time import perf_counter

from baton.config import InstanceConfig, KVConfig, QueueConfig, SchedulerConfig
from baton.core.effects import RunStep
from baton.core.events import Event, LossCause, StepDone, Submit, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import PREEMPTED_TOKEN_ID, StepPlan, StepResult


class StubWorker:
    """Answers a plan at once. Keeps what it must to know a last chunk from another one."""

    def __init__(self) -> None:
        self.incarnation: dict[int, int] = {}
        self.left: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self.incarnation[new.slot] = new.incarnation
            self.left[new.slot] = len(new.tokens) - new.computed_tokens
        values, lengths = [], []
        for slot, count in zip(plan.run.slots, plan.run.counts, strict=True):
            self.left[slot] -= count
            lengths.append(int(self.left[slot] <= 0))
            values += [7] * lengths[-1]
        slots = [*plan.run.slots, *(slot for slot, _ in plan.drops)]
        incarnations = [*(self.incarnation[s] for s in plan.run.slots), *(i for _, i in plan.drops)]
        values += [PREEMPTED_TOKEN_ID] * len(plan.drops)
        lengths += [1] * len(plan.drops)
        return StepResult(plan.step, plan.epoch, tuple(slots), tuple(incarnations), tuple(lengths), tuple(values))


def measure(running: int, waiting: int, steps: int, prompt: int = 64) -> dict[str, float]:
    config = InstanceConfig(
        kv=KVConfig(blocks=running * (prompt + steps + 64) // 16 + 1024, block_size=16),
        scheduler=SchedulerConfig(slots=running, tokens_per_step=8192),
        queue=QueueConfig(requests_max=waiting + running + 1, tokens_max=10**9),
    )
    instance, worker = Instance(config), StubWorker()
    plans = []

    def handle(event: object) -> float:
        begin = perf_counter()
        effects = instance.handle(event, Instant(0.0))  # type: ignore[arg-type]
        took = perf_counter() - begin
        plans.extend(effect.plan for effect in effects if isinstance(effect, RunStep))
        return took

    handle(WorkerReady(instance.worker.epoch, PoolIncarnation(1)))
    for number in range(running + waiting):
        tokens = tuple((number * 31 + place) % 50_000 for place in range(prompt))
        sampling = SamplingParams(max_tokens=steps + 32, stop_token_ids=(2,))
        handle(Submit(GenerateRequest(id=RequestId(str(number)), prompt=tokens, sampling=sampling)))
    times = []
    for step in range(steps):
        took = handle(StepDone(worker.run(plans.pop(0))))
        if step >= steps // 4:  # all are decoding by then
            times.append(took)
    assert instance.board.decoding == running, instance.board.decoding
    instance.check()
    return {
        "running": running,
        "waiting": waiting,
        "median_us": median(times) * 1e6,
        "p99_us": quantiles(times, n=100)[98] * 1e6,
    }


def burst(admissions: int) -> float:
    """Seconds of the one event in which so many requests are admitted: the worker gets ready and all of them wait."""
    config = InstanceConfig(
        kv=KVConfig(blocks=admissions * 32, block_size=16),
        scheduler=SchedulerConfig(slots=admissions, tokens_per_step=admissions * 16),
        queue=QueueConfig(requests_max=admissions, tokens_max=10**9),
    )
    instance = Instance(config)
    for number in range(admissions):
        tokens = tuple((number * 31 + place) % 50_000 for place in range(16))
        request = GenerateRequest(id=RequestId(str(number)), prompt=tokens, sampling=SamplingParams(max_tokens=4000))
        instance.handle(Submit(request), Instant(0.0))
    begin = perf_counter()
    instance.handle(WorkerReady(instance.worker.epoch, PoolIncarnation(1)), Instant(0.0))
    took = perf_counter() - begin
    assert len(instance.board.running) == admissions
    return took


def recovery(cause: LossCause, *, pool_kept: bool) -> int:
    """Steps from the start of another worker until each of 64 streams, behind prompts of 480 tokens, has its next token."""
    streams = 64
    config = InstanceConfig(
        kv=KVConfig(blocks=streams * 200, block_size=16),
        scheduler=SchedulerConfig(slots=streams, tokens_per_step=160, decode_gap_seconds=None),
        queue=QueueConfig(requests_max=streams, tokens_max=10**9),
    )
    instance, worker = Instance(config), StubWorker()
    plans: list[StepPlan] = []
    told: dict[str, int] = {}

    def handle(event: Event) -> None:
        for effect in instance.handle(event, Instant(0.0)):
            if isinstance(effect, RunStep):
                plans.append(effect.plan)
            elif isinstance(effect, Emit):
                for request, *_ in effect.tokens:
                    told[request] = told.get(request, 0) + 1

    handle(WorkerReady(instance.worker.epoch, PoolIncarnation(1)))
    for number in range(streams):
        tokens = tuple((number * 7 + place) % 50_000 for place in range(480))
        handle(Submit(GenerateRequest(id=RequestId(str(number)), prompt=tokens, sampling=SamplingParams(max_tokens=2000))))
    while len(told) < streams or min(told.values()) < 2:
        handle(StepDone(worker.run(plans.pop(0))))
    plans.clear()
    handle(WorkerLost(instance.worker.epoch, cause=cause))
    handle(WorkerReady(instance.worker.epoch, PoolIncarnation(1 if pool_kept else 2)))
    before, steps = dict(told), 0
    while any(told[request] == before[request] for request in before):
        handle(StepDone(worker.run(plans.pop(0))))
        steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps for each line (default 400)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    arguments = parser.parse_args()
    lines = [measure(running, waiting, arguments.steps) for running in (1, 64, 256) for waiting in (0, 10_000)]
    bursts = {admissions: min(burst(admissions) for _ in range(5)) for admissions in (128, 256, 512, 1024)}
    losses = {(cause, kept): recovery(cause, pool_kept=kept) for cause in ("killed", "died") for kept in (True, False)}
    if arguments.json:
        recovered = [{"cause": cause, "pool_kept": kept, "steps": steps} for (cause, kept), steps in losses.items()]
        print(json.dumps({"steps": lines, "bursts": bursts, "recovery": recovered}))
        return
    print(f"{'running':>8} {'waiting':>8} {'plan+absorb, median us':>24} {'p99 us':>10}")
    for line in lines:
        print(f"{line['running']:>8} {line['waiting']:>8} {line['median_us']:>24.1f} {line['p99_us']:>10.1f}")
    print(f"\n{'admissions in one event':>32} {'ms':>10} {'us each':>10}")
    for admissions, took in bursts.items():
        print(f"{admissions:>32} {took * 1e3:>10.1f} {took * 1e6 / admissions:>10.1f}")
    print(f"\n{'a worker is lost, 64 streams':>32} {'pool':>10} {'steps until all have a token':>30}")
    for (cause, kept), steps in losses.items():
        print(f"{cause:>32} {'kept' if kept else 'lost':>10} {steps:>30}")


if __name__ == "__main__":
    main()
