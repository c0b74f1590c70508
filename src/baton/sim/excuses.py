"""Excuses: errors that a client may get after a fault has happened. An error without such a fault is a violation (22).

A plain instance has no row here: its refusals and failures are computed exactly (reference.py).
"""

from __future__ import annotations

from typing import Final, Literal

Cost = Literal["delay", "refusal", "move", "poison"]
"""delay: requests wait, so that a queue may be full. refusal: no instance is left for a request that has not begun. move: a
request loses its instance; more moves than `migrations_max` end it with an error. poison: a worker is lost amid a step, so that
the requests in that step are suspects; a bystander may be given up after two such losses."""

_AWAY: Final[tuple[Cost, ...]] = ("delay", "refusal", "move")
_WORKER: Final[tuple[Cost, ...]] = ("delay", "refusal", "move", "poison")

EXCUSES: Final[dict[str, tuple[Cost, ...]]] = {
    # Processes of a cluster (ClusterFaultKind)
    "kill": _AWAY,
    "freeze": _AWAY,
    "reload": _AWAY,
    "stray": _AWAY,  # a router has accepted the stray, and it leaves
    "cut": _AWAY,
    "stall": _AWAY,
    "stall_up": _AWAY,
    "stall_down": _AWAY,
    "cache": _AWAY,
    "cache_hang": _AWAY,
    "worker": _WORKER,
    "worker_hang": _WORKER,
    "worker_freeze": _WORKER,
    "reload_worker": _WORKER,
    "drain": ("delay", "refusal"),  # an instance that drains gives its requests back
    "sleep": ("delay", "refusal"),
    "preempt": ("delay",),  # the instance keeps the request
    "evict": ("delay",),
    "leave": (),
    "not taken": ("delay", "refusal", "move"),  # a router has refused the instance for a while
    # Steps of a worker (StepFaultKind, and requests that kill it)
    "poison": _WORKER,
    "crash_before": _WORKER,
    "crash_amid": _WORKER,
    "crash_after": _WORKER,
    "hang": _WORKER,
    "lose_plan": _WORKER,
    "lose_result": _WORKER,
    "garble": _WORKER,
    "oom": _WORKER,
    "slow": _WORKER,  # possibly longer than step_seconds_max
    "plod": _WORKER,
    "rank_dies": _WORKER,
    "rank_hangs": _WORKER,
    "rank_differs": _WORKER,
    "rank_late": (),
    "late": _AWAY,  # a hand-off may wait for the step
    "repeat": (),
    "ghost": (),
    # Copies (CacheFaultKind), with "copy " before the kind
    "copy slow": _AWAY,
    "copy error": _AWAY,
    "copy silent": _AWAY,
    "copy short": _AWAY,
    "copy repeat": (),
}
"""Costs that one occurrence of a fault excuses, by its kind."""


class FaultLog:
    """The faults that have happened."""

    __slots__ = ("happened",)

    def __init__(self) -> None:
        self.happened: list[tuple[float, str]] = []

    def add(self, at: float, kind: str) -> None:
        self.happened.append((at, kind))

    def excuses(self, cost: Cost, since: float) -> int:
        """Number of faults since then that may have had this cost."""
        return sum(at >= since and cost in EXCUSES.get(kind, ()) for at, kind in self.happened)

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for _, kind in self.happened})
