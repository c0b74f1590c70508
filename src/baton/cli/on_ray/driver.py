"""The driver of a cluster on Ray: places and starts the keepers, waits until they are ready, and drains them in the end."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.cli.on_ray.bundles import ROUTER, Bundle, bundles_of, misfit, threads_for
from baton.cli.on_ray.keeper import KILL_SECONDS, KeeperOrders
from baton.cli.on_ray.ray_api import ASK_SECONDS, NameTaken, RayCluster
from baton.cli.say import Failed
from baton.config import Role

PLACE_SECONDS: Final = 60.0
"""Seconds that Ray may take to find room, with an autoscaler that starts nodes."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RayJob:
    """A cluster to run on Ray."""

    roles: Mapping[str, Role]
    serve: dict[str, Any]
    "Settings of `baton serve` for every instance."
    router: dict[str, Any]
    "Settings of `baton router`."
    strategy: str
    gpu: bool
    threads: int
    "Threads per instance. 0: by the nodes' CPUs."
    start_seconds: float
    ranks: int = 1
    "Processes of each instance that compute together, each with `threads` CPUs and a GPU."


def start(cluster: RayCluster, job: RayJob, report: Report) -> str:
    """Start the cluster and return its URL. Everything that was started is removed if anything fails."""
    _refuse_taken(cluster)
    threads = job.threads or threads_for(cluster.nodes(), len(job.roles) * job.ranks)
    bundles = bundles_of(job.roles, threads=threads, gpu=job.gpu, ranks=job.ranks)
    report(f"asking Ray for room: {', '.join(map(str, bundles))}")
    nodes = cluster.nodes()
    if not cluster.place(bundles, job.strategy, PLACE_SECONDS):
        why = misfit(bundles, nodes, apart=job.strategy == "strict_spread") or "the nodes have too little room together"
        raise Failed(f"Ray found no room within {PLACE_SECONDS:g} s: {why}")
    started: list[str] = []
    try:
        _refuse_taken(cluster)  # another command may have started it while this one waited for room
        for place, (bundle, orders) in enumerate(zip(bundles, _orders(job, bundles, threads), strict=True)):
            started.append(bundle.name)
            _start_keeper(cluster, place, bundle, orders, started)
        return wait_ready(cluster, [bundle.name for bundle in bundles], job.start_seconds, report)
    except BaseException:
        _end_keepers(cluster, started, 0.0, report)
        cluster.release()
        raise


def _refuse_taken(cluster: RayCluster) -> None:
    if there := cluster.keepers():
        raise Failed(
            f"Ray has a cluster {cluster.name} already ({', '.join(there)}): attach to it with --attach, end it with "
            f"`baton down --on ray --cluster-name {cluster.name}`, or give another --cluster-name"
        )


def _start_keeper(cluster: RayCluster, place: int, bundle: Bundle, orders: KeeperOrders, started: list[str]) -> None:
    """Start a keeper and add it to `started`. Its name is removed if the keeper is another command's, which must not be
    ended."""
    try:
        cluster.start(place, bundle, orders)
    except NameTaken:
        started.pop()
        raise


def _orders(job: RayJob, bundles: list[Bundle], threads: int) -> list[KeeperOrders]:
    secret, names = secrets.token_hex(32), tuple(job.roles)
    router = KeeperOrders(ROUTER, "router", job.router, secret, instances=names)
    return [router] + [
        KeeperOrders(
            one.name, "serve", {**job.serve, "name": one.name, "role": one.role, "threads": threads}, secret, routers=(ROUTER,)
        )
        for one in bundles
        if one.role is not None
    ]


def wait_ready(cluster: RayCluster, names: list[str], seconds: float, report: Report) -> str:
    """Wait until every tree is ready: the router last, because it is when an instance has joined."""
    if not names:
        raise Failed(f"Ray has no cluster {cluster.name}")
    for name in [*(name for name in names if name != ROUTER), ROUTER]:
        if why := cluster.ask(name, "wait_ready", seconds, seconds=seconds + ASK_SECONDS):
            raise Failed(f"{name} was not ready within {seconds:g} s: {why}; its log: `ray logs`")
        report(f"{name} is ready")
    return str(cluster.ask(ROUTER, "url"))


def end(cluster: RayCluster, drain_seconds: float, report: Report) -> None:
    """End the cluster: the router first, whose open requests finish while the instances still work. No keeper is left on
    Ray."""
    _end_keepers(cluster, cluster.keepers(), drain_seconds, report)
    cluster.release()


def _end_keepers(cluster: RayCluster, names: list[str], drain_seconds: float, report: Report) -> None:
    for name in sorted(names, key=lambda one: one != ROUTER):
        try:
            words = cluster.ask(name, "stop", drain_seconds, seconds=drain_seconds + 3 * KILL_SECONDS)
            report(f"{name} {words}")
        except Failed as error:  # the keeper is being started, or its node is lost
            report(str(error))
        cluster.remove(name)


def stop_signal() -> threading.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set from now on. Ray has a handler of its own until then."""
    came = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: came.set())
    return came
