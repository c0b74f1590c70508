"""Where the device's time goes between two steps, if the second waits for the first one's tokens (speculate_gpu.py --bubble).

    device   |--- graph n ---|  tokens to the host                idle               |--- graph n + 1 ---|
    host                         wake up |- finish -|- submit -|- launch -|- replay -|

period   of the device: from the end of a graph to the end of the next one. If steps run ahead it is the time of the graph
idle     of the device: from the end of a graph to the begin of the next one
finish   of the host: tokens -> slots
submit   drafts -> flat batch
launch   flat batch -> pinned memory, copy
replay   the call that queues the graph
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from baton.protocol.step import StepPlan
from baton.worker.cuda.executor import CudaLaunched
from baton.worker.flat_batch import FlatBatch
from baton.worker.in_flight_step import InFlightStep
from baton.worker.sampling_batch import SamplingBatch

PHASES = ("finish", "submit", "launch", "replay")


@dataclass(slots=True)
class Graph:
    """A replayed graph."""

    begin: Any
    "CUDA events around it."
    end: Any
    host: tuple[float, ...]
    "Times at the ends of the phases before it; the first is that of the wake-up."
    rows: int = 0
    "Rows of its step."


@dataclass(frozen=True, slots=True)
class Medians:
    """Of the steps with the most rows, in milliseconds."""

    period: float
    idle: float
    host: dict[str, float]
    "By phase."


class Tracer:
    """Measures the recorded steps of a runner while it is entered."""

    def __init__(self, runner: Any) -> None:
        """`runner`: a ModelRunner with a CudaExecutor, whose private parts are replaced."""
        self._runner, self._executor, self._device = runner, runner.executor, runner.executor._steps
        self._graphs: dict[Any, Any] = self._device._graphs
        self._raw = CudaLaunched.wait, runner.finish, runner.submit, runner.executor.launch
        self._times = [0.0] * (len(PHASES) + 1)
        self.graphs: list[Graph] = []

    def __enter__(self) -> Tracer:
        (wait, finish, submit, launch), times = self._raw, self._times

        def timed_wait(launched: CudaLaunched) -> None:
            wait(launched)
            times[0] = perf_counter()

        def timed_finish(in_flight: InFlightStep) -> None:
            finish(in_flight)
            times[1] = perf_counter()

        def counted_submit(plan: StepPlan) -> InFlightStep:
            before = len(self.graphs)
            in_flight: InFlightStep = submit(plan)
            for graph in self.graphs[before:]:
                graph.rows = in_flight.rows
            return in_flight

        def timed_launch(batch: FlatBatch, sampling: SamplingBatch) -> Any:
            times[2] = perf_counter()
            return launch(batch, sampling)

        self._replace(timed_wait, timed_finish, counted_submit, timed_launch)
        self._device._graphs = {kind: Traced(graph, self) for kind, graph in self._graphs.items()}
        return self

    def replay(self, graph: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._times[3] = perf_counter()
        begin.record()
        graph.replay()
        self._times[4] = perf_counter()
        end.record()
        self.graphs.append(Graph(begin, end, tuple(self._times)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._replace(*self._raw)
        self._device._graphs = self._graphs
        torch.cuda.synchronize()

    def _replace(self, wait: Any, finish: Any, submit: Any, launch: Any) -> None:
        CudaLaunched.wait = wait  # type: ignore[method-assign]
        self._runner.finish, self._runner.submit, self._executor.launch = finish, submit, launch

    def medians(self) -> Medians:
        most = max(graph.rows for graph in self.graphs)
        pairs = [pair for pair in pairwise(self.graphs) if pair[0].rows == pair[1].rows == most]
        phases = list(zip(*([end - begin for begin, end in pairwise(second.host)] for _, second in pairs), strict=True))
        return Medians(
            median(first.end.elapsed_time(second.end) for first, second in pairs),
            median(first.end.elapsed_time(second.begin) for first, second in pairs),
            {name: 1000 * median(seconds) for name, seconds in zip(PHASES, phases, strict=True)},
        )


class Traced:
    """A recorded graph whose replay is measured."""

    def __init__(self, graph: Any, tracer: Tracer) -> None:
        self._graph, self._tracer = graph, tracer

    def replay(self) -> None:
        self._tracer.replay(self._graph)
