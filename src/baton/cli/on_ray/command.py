"""`baton up --on ray`: settings of the command line become settings of the commands that the keepers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import typer

from baton.cli.cluster_options import PlacementOptions, RayOptions, UpOptions
from baton.cli.on_ray.driver import RayJob, end, start, stop_signal, wait_ready
from baton.cli.on_ray.ray_api import RayCluster
from baton.cli.router import OURS
from baton.cli.say import Failed
from baton.cli.settings import Given
from baton.config import ServeConfig
from baton.config.schema import GROUPS
from baton.config.values import DRAFT


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


FILES: Final = (
    "chat_template",
    "ssl_certfile",
    "ssl_keyfile",
    "cluster_ssl_certfile",
    "cluster_ssl_keyfile",
    "cluster_ssl_ca_certs",
)
KEYS: Final = ("api_key", "admin_api_key")
ROUTERS_ONLY: Final = frozenset({*GROUPS["Server"], *GROUPS["Administration"], "chat_template", "threads"}).difference(
    ("log_level", "log_format")
)
"""Clients reach the router alone. An instance listens on its own machine, for the keeper's question whether it is ready."""


def job_of(ray: RayOptions, options: UpOptions, given: Given, serve: ServeConfig, gpus: int) -> RayJob:
    """`serve`: with the keys of its files, which are read here and not on the nodes."""
    if serve.ssl_ca_certs:
        raise Failed("--ssl-ca-certs: a keeper on Ray has no certificate with which to ask the router whether it is ready")
    values = _with_absolute_paths(given.values(ServeConfig))
    keys = {name: list(getattr(serve, name)) for name in KEYS if getattr(serve, name)}
    on_gpus = serve.device == "cuda" or (serve.device == "auto" and gpus > 0)
    router = {name: value for name, value in values.items() if name in OURS and not name.endswith("_key_file")}
    return RayJob(
        roles=options.or_default(gpus // serve.tensor_parallel_size if on_gpus else 0).roles(),
        serve={name: value for name, value in values.items() if name not in ROUTERS_ONLY},
        router={"port": serve.port, **router, **keys, **given.values(PlacementOptions)},
        strategy=ray.ray_strategy,
        gpu=on_gpus,
        ranks=serve.tensor_parallel_size,
        threads=serve.threads or 0,
        start_seconds=serve.start_seconds_max,
    )


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Ray's processes have another working directory. A model that is no path here is an id or an alias."""
    found = dict(values)
    for name in FILES:
        if found.get(name):
            found[name] = _absolute(found[name])
    if (model := found.get("model")) and Path(model).expanduser().exists():
        found["model"] = _absolute(model)
    draft = found.get("speculate") or ""
    if draft.startswith(DRAFT) and Path(draft.removeprefix(DRAFT)).expanduser().exists():
        found["speculate"] = DRAFT + _absolute(draft.removeprefix(DRAFT))
    storage = found.get("kv_storage") or ""
    if storage.startswith("file:") and not storage.startswith("file://"):
        found["kv_storage"] = f"file:{_absolute(storage.removeprefix('file:'))}"
    return found


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _has_gpus(cluster: RayCluster) -> int:
    return int(sum(node.get("GPU", 0.0) for node in cluster.nodes()))
