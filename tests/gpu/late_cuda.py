"""torch.cuda without a GPU, as far as decode steps of DeviceSteps (worker/cuda/graphs.py) call it. A stream runs its work as
late as it may: when the host waits for an event. So a buffer that is written too early shows: queued work reads new numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from baton.worker.cuda import graphs
from baton.worker.cuda.layer_steps import StepLimits


class Device(TorchFunctionMode):
    """The queues, and a log of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.default = self.current = Stream(self)
        self.calls: list[str] = []

    def queue(self, run: Callable[[], Any]) -> None:
        assert self.current is not self.default, "work is queued on the default stream"
        self.current.queued.append(run)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name not in ("device", "pin_memory")}
        name = getattr(function, "__name__", str(function))
        self.calls.append(name)
        if name == "copy_" and kwargs.get("non_blocking"):
            to, what = args
            self.queue(lambda: to.numpy().__setitem__(..., what.numpy()))
            return to
        return function(*args, **kwargs)


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.queued: list[Callable[[], Any]] = []

    def synchronize(self) -> None:
        self.run(len(self.queued))

    def run(self, count: int) -> None:
        """Runs the oldest work."""
        for each in self.queued[:count]:
            each()
        del self.queued[:count]


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._done: list[bool] = []
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream, self._done = stream, (done := [])
        stream.queued.append(lambda: done.append(True))

    def synchronize(self) -> None:
        self._device.calls.append("synchronize")
        while self._stream is not None and not self._done:
            self._stream.run(1)


class Graph:
    def __init__(self, device: Device, run: Callable[[], Any]) -> None:
        self._device, self._run = device, run

    def replay(self) -> None:
        self._device.calls.append("replay")
        self._device.queue(self._run)


class CountingStep:
    """Stands for DecoderStep: its tokens are a function of the inputs, which it remembers."""

    rows_per_tile, deterministic, collective = 16, False, None
    config = SimpleNamespace(kv_heads=8)

    def __init__(self, slots: int, drafts: int) -> None:
        self.limits = StepLimits(rows=256, sequences=slots, context_tokens=256, drafts=drafts)
        self.pool = torch.zeros(1)
        self.tables = torch.zeros(slots, 16, dtype=torch.int32)
        self.adjustments = SimpleNamespace(write_rules=lambda bans, masks: None)
        self._tokens = torch.zeros(self.limits.sampled, dtype=torch.int32)
        self.computed: list[list[int]] = []
        "Tokens of all rows of each step."

    def run(self, inputs: Any, *, draws: bool, even: bool) -> None:
        columns = (inputs.token_ids, inputs.positions, inputs.row_slots, inputs.outputs)
        found = tokens_of(*(column.numpy() for column in columns))
        self._tokens.numpy()[: len(found)] = found
        self.computed.append(found.tolist())

    def tokens(self, due: int) -> torch.Tensor:
        return self._tokens[:due]


def tokens_of(token_ids: Any, positions: Any, slots: Any, outputs: Any) -> Any:
    return (
        np.asarray(token_ids) * 7 + np.asarray(positions) * 131 + np.asarray(slots) * 17 + np.asarray(outputs) * 29
    ) % 10_007


@contextmanager
def device_steps(monkeypatch: Any, *, slots: int = 8, drafts: int = 24) -> Iterator[tuple[graphs.DeviceSteps, Device]]:
    device = Device()

    def set_stream(stream: Stream) -> None:
        device.calls.append("set_stream")
        device.current = stream

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(device))
    monkeypatch.setattr(torch.cuda, "Event", lambda **settings: Event(device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: device.default)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(graphs.DeviceSteps, "_record", lambda steps, run: Graph(device, run))
    monkeypatch.setattr(graphs.MixedGraphs, "capture", lambda mixed, record: None)
    with device:
        steps = graphs.DeviceSteps(CountingStep(slots, drafts))  # type: ignore[arg-type]
        steps.capture()
        yield steps, device
