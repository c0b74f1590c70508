"""A worker with an overdue result is given up at its deadline, neither before nor after.

The deadline is computed independently: each step may take `step_seconds_max`, and as much again from each sign of progress on,
but never more than 20 times that.
"""

from __future__ import annotations

from baton.errors import InvariantBroken
from baton.sim.scenario import Scenario
from baton.sim.timeline import Timeline

LONGEST_STEPS = 20
ROUNDING = 1e-6


class StepWatch:
    __slots__ = ("_excused", "_progress_at", "_seconds", "_since", "_step", "_timeline")

    def __init__(self, scenario: Scenario, timeline: Timeline) -> None:
        self._seconds = scenario.step_seconds_max
        self._timeline = timeline
        self._step: int | None = None
        "The oldest plan in flight; `_since`: when it became the oldest."
        self._since = self._progress_at = 0.0
        self._excused = False

    def excuse(self) -> None:
        """Skip the check for the present step: the instance's clock was set, or it was frozen, so its times are not
        comparable."""
        self._excused = True

    def progressed(self) -> None:
        self._progress_at = self._timeline.now

    def after_event(self, oldest: int | None) -> None:
        if oldest != self._step:
            self._step, self._since = oldest, self._timeline.now
            self._progress_at = self._since

    def given_up(self) -> None:
        if self._step is not None and not self._excused and self._timeline.now < self._due - ROUNDING:
            raise InvariantBroken(
                f"the worker is given up at {self._timeline.now:.3f}, had time until {self._due:.3f}", invariant=46
            )

    def answered(self) -> None:
        """Record the result of the oldest plan."""
        if not self._excused and self._timeline.now > self._due + ROUNDING:
            raise InvariantBroken(
                f"step {self._step} is waited for at {self._timeline.now:.3f}, until {self._due:.3f}", invariant=46
            )

    @property
    def _due(self) -> float:
        return min(self._progress_at + self._seconds, self._since + LONGEST_STEPS * self._seconds)
