"""`baton up`: reads settings, checks the port, fetches the model; then one process runs a router and instances on this machine,
and this file prints its reports.

Every instance gets the options of `baton serve`. The router has the port and the keys; instances connect to a socket in a
private directory, with a secret generated for this run.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from baton.cli.cluster_options import PlacementOptions, RayOptions, UpOptions
from baton.cli.key_files import with_key_files
from baton.cli.local_cluster import engines_of, gpus_for, require_divisible, require_gpus, run_cluster
from baton.cli.say import INTERRUPTED, complaints, require_packages, resolve_model, with_draft_model, with_model
from baton.cli.serve import checked_port, warn_of_certificate
from baton.cli.settings import MEMBER, Given, parameters
from baton.config import ServeConfig
from baton.config.schema import all_settings

HELP = """Start a cluster on this machine: a router, and instances that compute prompts, generate, or do both.

\b
Examples:
  baton up                              one per GPU, or two on the CPU
  baton up --prefill 1 --decode 1       prompts here, streams there
  baton up --mixed 2 --port 8001        two instances that do both
  baton up ./model.gguf --prefill 2 --decode 2 --kv-storage file:/tmp/kv
  baton up --config up.yaml --plain     options as keys; lines, no table
  baton up --on ray --mixed 4           on the nodes of a Ray cluster

The options of `baton serve` apply to every instance; port, keys and queue are the router's. An instance
that dies is started again, and its requests go on elsewhere. Ctrl-C lets running requests finish and then
ends every process.
"""


def settings() -> list[Any]:
    ours = [*all_settings(UpOptions), *all_settings(PlacementOptions), *all_settings(RayOptions)]
    return [*ours, *all_settings(ServeConfig, MEMBER)]


def up(*, plain: bool, quiet: bool, **given: Any) -> None:
    with complaints("up"):
        require_packages()
        read = Given(given, settings(), quiet=quiet)
        options, placement, asked = read.read(UpOptions), read.read(PlacementOptions), with_key_files(read.read(ServeConfig))
        if (ray := read.read(RayOptions)).on == "ray":
            from baton.cli.on_ray.command import up_on_ray

            up_on_ray(ray, options, read, asked, quiet=quiet)
            return
        require_divisible(options, asked)
        serve = replace(asked, port=checked_port(asked), log_level="error" if quiet else asked.log_level)
        warn_of_certificate("up", serve, quiet=quiet)
        path = resolve_model(serve.model, serve.revision, command="up", quiet=quiet)
        serve = with_draft_model(with_model(serve, path), command="up", quiet=quiet)
        require_gpus(serve)
        options = options.or_default(gpus_for(serve) // serve.tensor_parallel_size)
        require_gpus(serve, len(options.roles()))
        require_divisible(options, serve)
        if not run_cluster(serve, placement, engines_of(options, serve), plain=plain, quiet=quiet):
            raise typer.Exit(INTERRUPTED)


def _own_options() -> list[Parameter]:
    """Parameters of this process's own options, which are not keys of the file."""
    options = {
        "plain": typer.Option("--plain", help="Print lines, and no table. Also where stdout or stderr is no terminal."),
        "quiet": typer.Option("--quiet", help="Print nothing but errors."),
    }
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, it]) for name, it in options.items()
    ]


_PARAMETERS = [*parameters(settings()), *_own_options()]
up.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]
up.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
