"""The output of `baton up` and `baton router` while they run: a line per event."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from baton.cli.say import ServerLines
from baton.runtime.up import UpReporter

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady, LoadProgress
    from baton.protocol.instance import ClusterView

SUMMARY_SECONDS = 30.0
"""Interval of summary lines, which are printed only if they changed."""


class PlainReporter(UpReporter):
    """Prints a line per event on stderr, and the ready text on stdout."""

    def __init__(
        self, command: str, ready_text: Callable[[InstanceReady, float], str], *, drain_seconds: float, quiet: bool = False
    ) -> None:
        self._command = command
        self._ready_text = ready_text
        self._drain_seconds = drain_seconds
        self._quiet = quiet
        self._begin = monotonic()
        self._loading: dict[str, str] = {}
        "Current stage of each instance that is not ready."
        self._states: dict[str, str] = {}
        self._summary_at = self._begin
        self._summary = ""
        self.was_ready = False
        self.lines = ServerLines(command)

    def say(self, text: str) -> None:
        if not self._quiet:
            self.lines.say(text)

    def show(self, text: str) -> None:
        if not self._quiet:
            self.lines.show(text)

    def on_progress(self, name: str, progress: LoadProgress) -> None:
        doing = progress.stage or "loads the model"
        if self._loading.get(name) != doing:
            self._loading[name] = doing
            self.say(f"{name}: {doing}" if progress.stage else f"{name} {doing}")

    def on_instance_ready(self, name: str) -> None:
        self._loading.pop(name, None)
        self.say(f"{name} is ready")

    def on_lost(self, name: str, why: str) -> None:
        self._loading.pop(name, None)
        requests = "open streams are lost" if name == "router" else "its requests go on elsewhere"
        self.say(f"{why}: starting another; {requests}")

    def on_ready(self, ready: InstanceReady) -> None:
        self.was_ready = True
        self.show(self._ready_text(ready, monotonic() - self._begin))

    def on_view(self, view: ClusterView) -> None:
        now = {instance.name: instance.state for instance in view.instances}
        for instance in view.instances:
            if instance.state == "suspect" and self._states.get(instance.name) == "alive":
                self.say(f"{instance.name} gets no new requests: {instance.fault}")
            elif instance.state == "alive" and self._states.get(instance.name) == "suspect":
                self.say(f"{instance.name} is well again")
        for name in self._states:
            if name not in now:
                self.say(f"{name} has left the cluster")
        for name in now:
            if name not in self._states and self.was_ready:
                self.say(f"{name} has joined the cluster")
        self._states = now
        self.print_summary(view)

    def print_summary(self, view: ClusterView) -> None:
        summary = summary_text(view)
        if self.was_ready and summary != self._summary and monotonic() - self._summary_at >= SUMMARY_SECONDS:
            self._summary_at, self._summary = monotonic(), summary
            self.say(summary)

    def on_stopping(self) -> None:
        if self.was_ready and sys.exc_info()[0] is None:
            seconds = self._drain_seconds
            self.say(f"draining: running requests have {seconds:g} s to finish; Ctrl-C again ends them now")


def summary_text(view: ClusterView) -> str:
    counters = view.counters
    refused = sum(count for name, count in counters.items() if name.startswith("refused_"))
    words = [
        f"{len(view.instances)} instances",
        f"{view.open} requests open, {view.queued} queued",
        f"{counters.get('handoffs', 0)} hand-offs"
        + (f" ({1000 * view.handoff_seconds:.0f} ms)" if view.handoff_seconds else ""),
        f"{counters.get('replays', 0)} replays",
        f"{sum(each.stats.preemptions for each in view.instances)} preemptions",
        f"{counters.get('instances_lost', 0)} instances lost",
        f"{refused} requests refused",
    ]
    return "; ".join(words)
