"""What a bound of prompt tokens beside decodes (prefill_tokens_beside_decodes) does to the gap between tokens.

    python bench/prefill_bound.py [--step-ms 6] [--token-ms 0.4] [--row-ms 0.4] [--clients 16] [--long 0] [--json]

The real core in virtual time, so it is exact and no other work on the machine disturbs it. A step takes
step-ms + row-ms x (sequences that decode) + token-ms x (prompt tokens): measure the three on your machine and put them in.
Each client asks again when it has its answer: prompts of 64 to 512 tokens, 128 tokens of output, different ids. With --long
every tenth prompt has so many tokens; the times to the first token are then those of the others.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from random import Random
from statistics import mean, quantiles
from typing import Any

from baton.config import InstanceConfig, KVConfig, SchedulerConfig
from baton.core.effects import RunStep
from baton.core.events import Event, StepDone, Submit, WorkerReady
from baton.core.instance import Instance
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import StepPlan
from scheduler import StubWorker

BOUNDS = (None, 256, 128, 64, 32, 16)
OUTPUT = 128


class Run:
    def __init__(self, bound: int | None, options: argparse.Namespace) -> None:
        scheduler = SchedulerConfig(slots=64, tokens_per_step=512, prefill_tokens_beside_decodes=bound)
        self.instance = Instance(InstanceConfig(kv=KVConfig(blocks=8192), scheduler=scheduler))
        self.options, self.rng, self.now, self.asked = options, Random(1), 0.0, 0
        self.plans: deque[StepPlan] = deque()
        self.sent: dict[RequestId, float] = {}
        self.last: dict[RequestId, float] = {}
        self.first_token: list[float] = []
        self.long: list[RequestId] = []
        self.gaps: list[float] = []
        self.tokens = 0

    def dispatch(self, event: Event) -> None:
        for effect in self.instance.handle(event, Instant(self.now)):
            if isinstance(effect, RunStep):
                self.plans.append(effect.plan)
            elif isinstance(effect, Emit):
                self._hear(effect)

    def ask(self) -> None:
        self.asked += 1
        name, size = RequestId(str(self.asked)), self.rng.randint(64, 512)
        if self.options.long and self.asked % 10 == 5:
            size = self.options.long
            self.long.append(name)
        self.sent[name] = self.now
        prompt = tuple(self.rng.randrange(50_000) for _ in range(size))
        self.dispatch(Submit(GenerateRequest(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=OUTPUT))))

    def _hear(self, emit: Emit) -> None:
        for name, *_ in emit.tokens:
            self.tokens += 1
            if name in self.last:
                self.gaps.append(self.now - self.last[name])
            elif name not in self.long:
                self.first_token.append(self.now - self.sent[name])
            self.last[name] = self.now
        if self.asked < self.options.requests:
            for _ in emit.ended:
                self.ask()

    def run(self) -> dict[str, Any]:
        options, worker = self.options, StubWorker()
        self.dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(1)))
        for _ in range(options.clients):
            self.ask()
        while self.plans:
            plan = self.plans.popleft()
            result = worker.run(plan)
            chunks = [count for count in plan.run.counts if count > 1]
            rows = len(plan.run.counts) - len(chunks)
            self.now += (options.step_ms + options.row_ms * rows + options.token_ms * sum(chunks)) / 1000
            self.dispatch(StepDone(result))
        return {
            "bound": self.instance.config.scheduler.prefill_tokens_beside_decodes,
            "tokens_per_second": self.tokens / self.now,
            "first_token_ms": {"mean": 1e3 * mean(self.first_token), "p99": 1e3 * quantiles(self.first_token, n=100)[98]},
            "gap_ms": {
                "mean": 1e3 * mean(self.gaps),
                "p99": 1e3 * quantiles(self.gaps, n=100)[98],
                "max": 1e3 * max(self.gaps),
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=6.0, help="a step, whatever is in it (default 6)")
    parser.add_argument("--row-ms", type=float, default=0.4, help="more for each sequence that decodes (default 0.4)")
    parser.add_argument("--token-ms", type=float, default=0.4, help="more for each prompt token (default 0.4)")
    parser.add_argument("--clients", type=int, default=16, help="requests open at a time (default 16)")
    parser.add_argument("--requests", type=int, default=200, help="in all (default 200)")
    parser.add_argument("--long", type=int, default=0, help="tokens of every tenth prompt (default: as the others)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    options = parser.parse_args()
    lines = [Run(bound, options).run() for bound in BOUNDS]
    if options.json:
        print(json.dumps(lines))
        return
    print(
        f"{'bound':>6} {'tok/s':>8} {'TTFT mean':>10} {'TTFT p99':>10} {'gap mean':>10} {'gap p99':>10} {'gap max':>10}   (ms)"
    )
    for line in lines:
        ttft, gap = line["first_token_ms"], line["gap_ms"]
        print(
            f"{line['bound'] or 'none':>6} {line['tokens_per_second']:>8.0f} {ttft['mean']:>10.0f} {ttft['p99']:>10.0f} "
            f"{gap['mean']:>10.1f} {gap['p99']:>10.1f} {gap['max']:>10.1f}"
        )


if __name__ == "__main__":
    main()
