"""Resources of each process tree of a cluster on Ray, and the tree that does not fit. Plain functions of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton.config import Role

ROUTER: Final = "router"
ROUTER_CPUS: Final = 1.0
"""Number of CPUs left to the router when they are divided."""
HEAD: Final = "node:__internal_head__"
"""Name of the resource that only Ray's head node has. The router runs there: its address is known and stays, and if that node
is lost, so is Ray."""

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Bundle:
    name: str
    role: Role | None
    "Name of the instance. None: the router."
    resources: dict[str, float]

    def __str__(self) -> str:
        return f"{self.name} needs {'the head node' if HEAD in self.resources else amounts(self.resources)}"


def amounts(resources: Resources) -> str:
    """Amounts as text for users: "2 CPUs and 1 GPU"."""
    return " and ".join(_amount(kind, count) for kind, count in resources.items() if count) or "nothing"


def _amount(kind: str, count: float) -> str:
    return f"{count:g} {kind}{'s' * (count != 1)}"


def bundles_of(roles: Mapping[str, Role], *, threads: int, gpu: bool, ranks: int = 1) -> list[Bundle]:
    """The router first: instances dial it."""
    cpus = float(threads * ranks)
    needs = {"CPU": cpus, "GPU": float(ranks)} if gpu else {"CPU": cpus}
    instances = [Bundle(name, role, dict(needs)) for name, role in roles.items()]
    return [Bundle(ROUTER, None, {HEAD: 0.001}), *instances]


def threads_for(nodes: Sequence[Resources], instances: int) -> int:
    """Default threads per instance: the CPUs beside the router's, divided, and no more than the smallest node has."""
    cpus = [node.get("CPU", 0.0) for node in nodes if node.get("CPU", 0.0) >= 1]
    if not cpus:
        return 1
    each = int((sum(cpus) - ROUTER_CPUS) // max(1, instances))
    return max(1, min(each, int(min(cpus))))


def misfit(bundles: Iterable[Bundle], nodes: Sequence[Resources], *, apart: bool = False) -> str:
    """The first bundle that no node can hold, in words. Empty: all fit. `apart`: each on a node of its own.

    First-fit, the largest first: a packing that exists may be missed, which is why this explains a failure and prevents none.
    """
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda one: sorted(one.resources.items(), reverse=True), reverse=True):
        place = next((node for node in free if all(node.get(kind, 0) >= n for kind, n in bundle.resources.items())), None)
        if place is None:
            most = {kind: max((node.get(kind, 0.0) for node in free), default=0.0) for kind in bundle.resources}
            left = " and ".join(_amount(kind, count) for kind, count in most.items())
            return f"{bundle}; the node with most has {left} free"
        if apart:
            free.remove(place)
        else:
            for kind, count in bundle.resources.items():
                place[kind] -= count
    return ""
