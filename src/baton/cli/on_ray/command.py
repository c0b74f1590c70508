"""`baton up --on ray`: settings of the command line become settings of the commands that the keepers run."""

from __future__ import annotations

from typing import Any

import typer

from baton.cli.cluster_options import PlacementOptions, RayOptions, UpOptions
from baton.cli.on_ray.driver import RayJob, end, start, stop_signal, wait_ready
from baton.cli.on_ray.ray_api import RayCluster
from baton.cli.router import OURS
from baton.cli.settings import Given
from baton.config import ServeConfig


def up_on_ray(ray: RayOptions, options: UpOptions, given: Given, serve: ServeConfig, *, quiet: bool) -> None:
    """Run until Ctrl-C, or until all is ready with --detach."""

    def report(line: str) -> None:
        if not quiet:
            typer.echo(f"baton up: {line}", err=True)

    cluster = RayCluster(ray.ray_address, ray.cluster_name, insecure=ray.ray_insecure)
    try:
        if ray.attach:
            url = wait_ready(cluster, cluster.keepers(), serve.start_seconds_max, report)
        else:
            url = start(cluster, job_of(ray, options, given, serve, _has_gpus(cluster)), report)
        stopped = stop_signal()
        report(f"ready at {url}; {url}/v1/cluster shows the instances")
        if ray.detach:
            report(f"it goes on without this command; `baton down --on ray --cluster-name {ray.cluster_name}` ends it")
            return
        stopped.wait()
        report(f"ends; open requests have {serve.drain_seconds_max:g} s")
        end(cluster, serve.drain_seconds_max, report)
    finally:
        cluster.disconnect()


def job_of(ray: RayOptions, options: UpOptions, given: Given, serve: ServeConfig, gpus: int) -> RayJob:
    values: dict[str, Any] = given.values(ServeConfig)
    on_gpus = serve.device == "cuda" or (serve.device == "auto" and gpus > 0)
    router = {name: value for name, value in values.items() if name in OURS}
    only_routers = {"host", "port", "admin_port", "threads"}
    return RayJob(
        roles=options.or_default(gpus if on_gpus else 0).roles(),
        serve={name: value for name, value in values.items() if name not in only_routers},
        router={"port": serve.port, **router, **given.values(PlacementOptions)},
        strategy=ray.ray_strategy,
        gpu=on_gpus,
        threads=serve.threads or 0,
        start_seconds=serve.start_seconds_max,
    )


def _has_gpus(cluster: RayCluster) -> int:
    return int(sum(node.get("GPU", 0.0) for node in cluster.nodes()))
