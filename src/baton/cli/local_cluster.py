"""A cluster on this machine, for `baton up` and `baton serve --data-parallel-size`: GPUs and cores of each instance, and the
process that runs router and instances.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baton.cli.banner import api_rows, banner, base_url, model_rows, try_row
from baton.cli.cluster_options import PlacementOptions, UpOptions
from baton.cli.say import Failed, ignore_further_signals
from baton.config import EngineConfig, Role, ServeConfig, WorkerConfig

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady


def require_divisible(options: UpOptions, serve: ServeConfig) -> None:
    if serve.gpu_memory_utilization is not None and len(options.roles()) > 1 and serve.device != "cuda":
        raise Failed(
            "--gpu-memory-utilization: an instance takes what the whole machine has free once its weights are loaded; several "
            "that start at once would count each other's memory or not, as it happens, so no share is right for all of them: "
            "give --kv-memory-gib, which is per instance; or --device cuda, where instances on one GPU divide the share"
        )


class GpuPlace(NamedTuple):
    device_index: int
    "Index of the GPU among the visible ones."
    sharers: int = 1
    "Number of instances on the GPU."
    place: int = 0
    "Index of this instance among those on the GPU."


def places_on_gpus(names: Sequence[str], gpus: int) -> dict[str, GpuPlace]:
    """Assigns GPUs round-robin: instances of one role are on different GPUs as far as possible. Without a GPU none is
    assigned."""
    if not gpus:
        return dict.fromkeys(names, GpuPlace(0))
    on_each = Counter(number % gpus for number in range(len(names)))
    return {name: GpuPlace(number % gpus, on_each[number % gpus], number // gpus) for number, name in enumerate(names)}


def gpus_for(serve: ServeConfig) -> int:
    """Number of GPUs for the instances. `serve.model` must be a path."""
    from baton.worker.platforms.visible import visible_gpus

    on_gpu = serve.device == "cuda" or (serve.device == "auto" and not Path(serve.model).is_file())  # a GGUF file runs on a CPU
    return visible_gpus() if on_gpu else 0


def require_gpus(serve: ServeConfig, instances: int = 1) -> None:
    """Refuses more ranks than GPUs, and GPUs of an instance that cannot read each other's memory, before anything is loaded."""
    ranks = serve.tensor_parallel_size
    gpus = gpus_for(serve) if ranks > 1 or serve.data_parallel_size > 1 else 0
    if not gpus:
        return  # a CPU, or instances of one rank, which may share a GPU
    if instances > 1 and gpus < instances * ranks:
        instead = "give fewer" if ranks > 1 else f"give fewer, or `baton up --mixed {instances}`, whose instances share GPUs"
        raise Failed(
            f"{instances} instances with {ranks} rank{'s' * (ranks > 1)} each need {instances * ranks} GPUs, and "
            f"{gpus} {'are' if gpus > 1 else 'is'} visible: {instead} (CUDA_VISIBLE_DEVICES hides GPUs)"
        )
    if gpus < ranks:
        raise Failed(
            f"--tensor-parallel-size {ranks}: {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and each rank needs one: "
            "give fewer ranks, or --device cpu (CUDA_VISIBLE_DEVICES hides GPUs)"
        )
    if ranks == 1:
        return
    from baton.worker.platforms.visible import without_peer_access

    for first in range(0, instances * ranks, ranks):
        if pair := without_peer_access(range(first, first + ranks)):
            raise Failed(
                f"--tensor-parallel-size {ranks}: GPU {pair[0]} cannot read the memory of GPU {pair[1]} (no peer access): "
                "choose GPUs that are connected with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m shows them)"
            )


def shares_of_cores(names: list[str], cores: int) -> dict[str, int]:
    """Compute threads per instance by default: the cores divided, with the remainder for the first ones, which compute prompts.
    At least one each: more instances than cores share them."""
    each, over = divmod(cores, len(names))
    return {name: max(1, each + (place < over)) for place, name in enumerate(names)}


def engines_of(options: UpOptions, serve: ServeConfig) -> dict[str, EngineConfig]:
    """Configs of the instances, without the router's address, which is known later."""
    from baton.worker.platforms.cpu import usable_cores

    roles, ranks = options.roles(), serve.tensor_parallel_size
    threads = dict.fromkeys(roles, serve.threads) if serve.threads else shares_of_cores(list(roles), usable_cores() // ranks)
    places = places_on_gpus(list(roles), gpus_for(serve) // ranks)

    def engine_of(name: str, role: Role) -> EngineConfig:
        engine, place = replace(serve, threads=threads[name]).engine(), places[name]
        worker = replace(engine.worker, device_index=place.device_index, device_sharers=place.sharers, device_place=place.place)
        return replace(engine, worker=worker, role=role, name=name)

    return {name: engine_of(name, role) for name, role in roles.items()}


def run_cluster(
    serve: ServeConfig,
    placement: PlacementOptions,
    engines: Mapping[str, EngineConfig],
    *,
    plain: bool,
    quiet: bool,
    command: str = "up",
) -> bool:
    """Runs until Ctrl-C. Returns False if that came before everything was ready. `command`: the one that was typed."""
    from baton.cli.cluster_table import LiveReporter
    from baton.cli.cluster_view import PlainReporter
    from baton.config.router_process import RouterProcessConfig
    from baton.runtime.processes.private_folder import PrivateFolder
    from baton.runtime.up import UpConfig, UpGroup
    from baton.trust.secret import create_secret

    def text(ready: InstanceReady, seconds: float) -> str:
        return ready_text(serve, engines, ready, seconds)

    drain = serve.drain_seconds_max
    lines = plain or quiet or not (sys.stdout.isatty() and sys.stderr.isatty())
    reporter = (
        PlainReporter(command, text, drain_seconds=drain, quiet=quiet)
        if lines
        else LiveReporter(command, text, drain_seconds=drain, names=list(engines))
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
                ignore_further_signals()

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
    """The GPU of each instance, as text."""
    return ", ".join(f"{name} {_gpus_of(engine.worker)}" for name, engine in engines.items())


def _gpus_of(worker: WorkerConfig) -> str:
    first = worker.gpu_index
    return f"{first}" if worker.ranks == 1 else f"{first}-{first + worker.ranks - 1}"


def threads_text(engines: Mapping[str, EngineConfig]) -> str:
    """Compute threads of each instance, as text. Too few cores slow the instances down."""
    from baton.worker.platforms.cpu import usable_cores

    cores, threads = usable_cores(), {name: engine.worker.threads for name, engine in engines.items()}
    words = ", ".join(f"{name} {count}" for name, count in threads.items())
    over = sum(engine.worker.threads * engine.worker.ranks for engine in engines.values()) - cores
    return f"{words}; {cores} cores" + (", which the instances share: streams wait for prompts" if over > 0 else "")
