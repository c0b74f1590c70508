"""`baton up`: reads settings, checks the port, fetches the model; then one process runs a router and instances on this machine,
and this file prints its reports.

Every instance gets the options of `baton serve`. The router has the port and the keys; instances connect to a socket in a
private directory, with a secret generated for this run.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from baton.cli.banner import api_rows, banner, base_url, model_rows, try_row
from baton.cli.cluster_options import PlacementOptions, RayOptions, UpOptions
from baton.cli.key_files import with_key_files
from baton.cli.say import INTERRUPTED, Failed, complaints, end_unhurried, require_packages, resolve_model, with_model
from baton.cli.serve import checked_port, warn_of_certificate
from baton.cli.settings import MEMBER, Given, parameters
from baton.config import EngineConfig, Role, ServeConfig
from baton.config.schema import all_settings

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady

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
        serve = with_model(serve, path)
        options = options.or_default(gpus_for(serve))
        require_divisible(options, serve)
        if not run_cluster(serve, placement, engines_of(options, serve), plain=plain, quiet=quiet):
            raise typer.Exit(INTERRUPTED)


def _own_options() -> list[Parameter]:
    """Options of this process: they are not keys of the file."""
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


def require_divisible(options: UpOptions, serve: ServeConfig) -> None:
    if serve.gpu_memory_utilization is not None and len(options.roles()) > 1 and serve.device != "cuda":
        raise Failed(
            "--gpu-memory-utilization: an instance takes what the whole machine has free once its weights are loaded; several "
            "that start at once would count each other's memory or not, as it happens, so no share is right for all of them: "
            "give --kv-memory-gib, which is per instance; or --device cuda, where instances on one GPU divide the share"
        )


class GpuPlace(NamedTuple):
    device_index: int
    "Index among the visible GPUs."
    sharers: int = 1
    "Number of instances on the GPU."
    place: int = 0
    "Index among those instances."


def places_on_gpus(names: Sequence[str], gpus: int) -> dict[str, GpuPlace]:
    """Assigns GPUs round-robin: instances of one role are on different GPUs as far as possible. Without a GPU nothing is
    shared."""
    if not gpus:
        return dict.fromkeys(names, GpuPlace(0))
    on_each = Counter(number % gpus for number in range(len(names)))
    return {name: GpuPlace(number % gpus, on_each[number % gpus], number // gpus) for number, name in enumerate(names)}


def gpus_for(serve: ServeConfig) -> int:
    """Number of GPUs for the instances. `serve.model` must be a path."""
    from baton.worker.platforms.visible import visible_gpus

    elsewhere = serve.device not in ("auto", "cuda") or Path(serve.model).is_file()  # GGUF files run on a CPU
    return 0 if elsewhere else visible_gpus()


def shares_of_cores(names: list[str], cores: int) -> dict[str, int]:
    """Compute threads per instance by default: the cores divided, with the remainder for the first ones, which compute prompts.
    At least one each: more instances than cores share them."""
    each, over = divmod(cores, len(names))
    return {name: max(1, each + (place < over)) for place, name in enumerate(names)}


def engines_of(options: UpOptions, serve: ServeConfig) -> dict[str, EngineConfig]:
    """Configs of the instances, without the router's address, which is known later."""
    from baton.worker.platforms.cpu import usable_cores

    roles = options.roles()
    threads = dict.fromkeys(roles, serve.threads) if serve.threads else shares_of_cores(list(roles), usable_cores())
    places = places_on_gpus(list(roles), gpus_for(serve))

    def engine_of(name: str, role: Role) -> EngineConfig:
        engine, place = replace(serve, threads=threads[name]).engine(), places[name]
        worker = replace(engine.worker, device_index=place.device_index, device_sharers=place.sharers, device_place=place.place)
        return replace(engine, worker=worker, role=role, name=name)

    return {name: engine_of(name, role) for name, role in roles.items()}


def run_cluster(
    serve: ServeConfig, placement: PlacementOptions, engines: Mapping[str, EngineConfig], *, plain: bool, quiet: bool
) -> bool:
    """Runs until Ctrl-C. Returns False if that came before everything was ready."""
    from baton.cli.cluster_table import LiveReporter
    from baton.cli.cluster_view import PlainReporter
    from baton.runtime.processes.private_folder import PrivateFolder
    from baton.runtime.router.router_config import RouterProcessConfig
    from baton.runtime.up import UpConfig, UpGroup
    from baton.trust.secret import create_secret

    def text(ready: InstanceReady, seconds: float) -> str:
        return ready_text(serve, engines, ready, seconds)

    drain = serve.drain_seconds_max
    lines = plain or quiet or not (sys.stdout.isatty() and sys.stderr.isatty())
    reporter = (
        PlainReporter("up", text, drain_seconds=drain, quiet=quiet)
        if lines
        else LiveReporter("up", text, drain_seconds=drain, names=list(engines))
    )
    folder = PrivateFolder()
    try:
        secret, address = folder.path / "cluster.secret", f"unix:{folder.path / 'router.sock'}"
        create_secret(secret)
        router = RouterProcessConfig(serve=serve, router=placement.router(serve), listen=address, cluster_secret=str(secret))
        dialling = {name: replace(engine, routers=(address,), cluster_secret=str(secret)) for name, engine in engines.items()}

        async def run() -> None:
            with reporter.drawing() if isinstance(reporter, LiveReporter) else nullcontext():
                await UpGroup(UpConfig(router=router, engines=dialling), reporter).run()
                end_unhurried()

        with closing(reporter.lines):
            asyncio.run(run())
            if reporter.was_ready and not quiet:
                reporter.lines.say("stopped")
    finally:
        folder.remove()
    return reporter.was_ready


def ready_text(serve: ServeConfig, engines: Mapping[str, EngineConfig], ready: InstanceReady, seconds: float) -> str:
    on_gpus = ready.plan.get("device") == "cuda"
    rows = [
        *api_rows(serve, ready),
        ("cluster", f"{base_url(serve, serve.host, serve.port)}/v1/cluster"),
        ("instances", ", ".join(engines)),
        ("GPUs", gpus_text(engines)) if on_gpus else ("threads", threads_text(engines)),
        *model_rows(serve, ready, each=", each instance" if len(engines) > 1 else ""),
        try_row(serve, ready),
    ]
    name, count = serve.served_model_name[0], len(engines)
    return banner(f"serves {name} with {count} instance{'s' * (count > 1)}, ready in {seconds:.1f} s", rows, serve)


def gpus_text(engines: Mapping[str, EngineConfig]) -> str:
    """The GPU of each instance."""
    return ", ".join(f"{name} {engine.worker.device_index}" for name, engine in engines.items())


def threads_text(engines: Mapping[str, EngineConfig]) -> str:
    """Compute threads of each instance. Too few cores slow the instances down."""
    from baton.worker.platforms.cpu import usable_cores

    cores, threads = usable_cores(), {name: engine.worker.threads for name, engine in engines.items()}
    words = ", ".join(f"{name} {count}" for name, count in threads.items())
    over = sum(threads.values()) - cores
    return f"{words}; {cores} cores" + (", which the instances share: streams wait for prompts" if over > 0 else "")
