"""Start-up is a table: which processes start in what order, which one creates the KV pool and which attach to it.

| blocks   | role           | tiers | order                      | creates the pool | attaches         |
| profiled | mixed          | yes   | worker, then cache service | worker           | transfer         |
| profiled | mixed          | no    | worker only                | worker           | none             |
| profiled | prefill/decode | yes   | worker, then cache service | messenger        | worker, transfer |
| profiled | prefill/decode | no    | worker, then cache service | messenger        | worker           |
| given    | mixed          | yes   | worker, then cache service | worker           | transfer         |
| given    | mixed          | no    | worker only                | worker           | none             |
| given    | prefill/decode | yes   | cache service, then worker | messenger        | worker, transfer |
| given    | prefill/decode | no    | cache service, then worker | messenger        | worker           |

"tiers": prefix cache and a host or storage tier. Only the worker, its weights loaded, knows how many blocks fit; so where
they are not given it comes first. In mixed it owns the pool, so that weights and cache are released together. In prefill and
decode the messenger does: it registers the memory with the transport, and a pool that outlives its worker lets the next
worker go on. Transfer and messenger are roles inside one process, the cache service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from baton.config import Role

Process = Literal["worker", "cache"]
PoolUser = Literal["worker", "transfer", "messenger"]
Action = Literal["start", "size", "create", "attach"]

PROCESS_OF: Final[dict[PoolUser, Process]] = {"worker": "worker", "transfer": "cache", "messenger": "cache"}


@dataclass(frozen=True, slots=True)
class StartupStep:
    """A step of the start-up, which ends before the next one begins."""

    action: Action
    """start: the process exists. size: the worker has determined how many blocks fit. create: the process has created the pool,
    and announced it if another process attaches. attach: the process has mapped, verified and confirmed the pool."""
    process: Process


@dataclass(frozen=True, slots=True)
class StartupPlan:
    steps: tuple[StartupStep, ...]
    creator: PoolUser
    attachers: tuple[PoolUser, ...]

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes in the order of their start. Only these are started."""
        return tuple(step.process for step in self.steps if step.action == "start")


def plan_startup(*, blocks_given: bool, role: Role, tiers: bool) -> StartupPlan:
    sizing = () if blocks_given else (StartupStep("size", "worker"),)
    worker, cache = StartupStep("start", "worker"), StartupStep("start", "cache")
    if role == "mixed":
        made = (worker, *sizing, StartupStep("create", "worker"))
        return StartupPlan((*made, cache, StartupStep("attach", "cache")), "worker", ("transfer",)) if tiers else _alone(made)
    attachers: tuple[PoolUser, ...] = ("worker", "transfer") if tiers else ("worker",)
    created, attached = StartupStep("create", "cache"), StartupStep("attach", "worker")
    if blocks_given:
        return StartupPlan((cache, created, worker, attached), "messenger", attachers)
    return StartupPlan((worker, *sizing, cache, created, attached), "messenger", attachers)


def _alone(steps: tuple[StartupStep, ...]) -> StartupPlan:
    return StartupPlan(steps, "worker", ())
