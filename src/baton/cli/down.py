"""`baton down`: ends a cluster that `baton up --on ray --detach` has started."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.say import Failed, complaints

HELP = """End a cluster that runs on Ray: running requests finish, then every process ends.

\b
Examples:
  baton down --on ray
  baton down --on ray --cluster-name chat --drain-seconds 120

A cluster of `baton up` on this machine ends with Ctrl-C.
"""


def down(
    on: Annotated[str, typer.Option("--on", metavar="WHERE", help="Where the cluster runs: ray.")] = "ray",
    cluster_name: Annotated[str, typer.Option("--cluster-name", metavar="NAME", help="Name of the cluster.")] = "baton",
    ray_address: Annotated[str, typer.Option("--ray-address", metavar="ADDRESS", help="Address of Ray.")] = "auto",
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", help="How long open requests may take to finish.")] = 30.0,
    ray_insecure: Annotated[bool, typer.Option("--ray-insecure", help="Use Ray without token authentication.")] = False,
) -> None:
    with complaints("down"):
        from baton.cli.on_ray.driver import end
        from baton.cli.on_ray.ray_api import RayCluster

        if on != "ray":
            raise Failed(f"--on {on}: only clusters on Ray are ended by this command; `baton up` ends with Ctrl-C")
        cluster = RayCluster(ray_address, cluster_name, insecure=ray_insecure)
        if cluster.keepers():
            end(cluster, drain_seconds, lambda line: typer.echo(f"baton down: {line}", err=True))
        elif cluster.release():
            typer.echo(f"baton down: nothing of a cluster {cluster_name} runs; what it had reserved is free again", err=True)
        else:
            raise Failed(f"Ray has no cluster {cluster_name}")
        cluster.disconnect()
