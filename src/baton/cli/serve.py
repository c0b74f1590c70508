"""`baton serve`: reads settings, checks the port, fetches the model; then the supervisor runs the processes, and this file
prints its reports.

settings   flags over file over defaults (settings.py)      wrong: one line, exit 1, nothing was started
port       tried before anything is loaded                  taken: one line, exit 1
model      downloaded with a bar, if it is not cached
load       front, engine and worker start                   bar from the worker's progress, gone when loading ends
ready      address, a curl line, settings                   on stdout
Ctrl-C     running requests finish, then all processes end  exit 0
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from inspect import Parameter, Signature
from socket import gethostname
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.banner import api_rows, banner, base_url, model_rows, try_row
from baton.cli.key_files import with_key_files
from baton.cli.progress import open_stages
from baton.cli.say import (
    INTERRUPTED,
    Failed,
    ServerLines,
    complaints,
    ignore_further_signals,
    require_packages,
    resolve_model,
    with_draft_model,
    with_model,
)
from baton.cli.settings import parameters, read_config
from baton.config import NODE_NAME_CHARACTERS_MAX, CredentialOptions, ServeConfig, lowered_context
from baton.config.schema import flag_of

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady, LoadProgress


HELP = """Serve a model: OpenAI, Anthropic and Ollama APIs and a chat page on one port.

\b
Examples:
  baton serve                                 a small model, on port 8000
  baton serve Qwen/Qwen2.5-0.5B-Instruct      from the Hugging Face hub
  baton serve ./model.gguf --port 8001        a file
  baton serve --config serve.yaml             options as keys; flags win
  baton serve --host 0.0.0.0 --api-key KEY    for other machines

Ctrl-C lets running requests finish and then ends every process. Settings come from options and the file alone, never from
environment variables. With --router it is an instance of a cluster (docs/cluster.md; `baton up` starts all of one).
"""


def serve(*, quiet: bool, until_stdin_ends: bool, **given: Any) -> None:
    with complaints("serve"):
        require_packages()
        asked = with_key_files(read_config(given, quiet=quiet))
        config = replace(asked, port=checked_port(asked), log_level="error" if quiet else asked.log_level)
        warn_of_certificate("serve", config, quiet=quiet)
        if config.routers and not config.name:
            config = replace(config, name=node_name(config.port))
        path = resolve_model(config.model, config.revision, command="serve", quiet=quiet)
        config = with_draft_model(with_model(config, path), command="serve", quiet=quiet)
        require_gpus(config)
        run = run_instances if config.data_parallel_size > 1 else run_server
        if not run(config, quiet=quiet, until_stdin_ends=until_stdin_ends):
            raise typer.Exit(INTERRUPTED)


def require_gpus(config: ServeConfig) -> None:
    if config.tensor_parallel_size > 1 or config.data_parallel_size > 1:
        from baton.cli import local_cluster

        local_cluster.require_gpus(config, config.data_parallel_size)


def run_instances(config: ServeConfig, *, quiet: bool, until_stdin_ends: bool) -> bool:
    """Runs several instances behind one port, as `baton up --mixed N` does."""
    from baton.cli import local_cluster
    from baton.cli.cluster_options import PlacementOptions, UpOptions

    if until_stdin_ends:
        raise Failed("--until-stdin-ends is for one instance: leave out --data-parallel-size")
    options = UpOptions(mixed=config.data_parallel_size)
    local_cluster.require_divisible(options, config)
    engines = local_cluster.engines_of(options, config)
    return local_cluster.run_cluster(config, PlacementOptions(), engines, plain=True, quiet=quiet, command="serve")


def _own_options() -> list[Parameter]:
    """Parameters of this process's own options, which are not keys of the file."""
    quiet = typer.Option("--quiet", help="Print nothing but errors.")
    until = typer.Option("--until-stdin-ends", help="Stop when stdin is closed: for a parent process.", hidden=True)
    options = {"quiet": quiet, "until_stdin_ends": until}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, it]) for name, it in options.items()
    ]


# Typer reads the signature; it is built from the fields of ServeConfig.
_PARAMETERS = [*parameters(), *_own_options()]
serve.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}


def checked_port(config: ServeConfig) -> int:
    """Checks everything that can be checked before a model is fetched and processes start. Returns the port."""
    from baton.api.config import api_config_of
    from baton.api.http.tls import tls_context
    from baton.kvcache.storage.open import check_address
    from baton.runtime.credentials import credentials_of
    from baton.runtime.wire.listener import usable_port
    from baton.text.loading import read_template

    config.engine()
    if config.cluster_secret:
        credentials_of(config)
    if config.kv_storage:
        check_address(config.kv_storage)
    api_config_of(config, {})
    tls_context(config)
    if config.chat_template:
        read_template(config.chat_template)
    if config.admin_port is not None:
        usable_port(config.admin_host, config.admin_port, "admin-")
    return usable_port(config.host, config.port)


def warn_of_certificate(command: str, config: ServeConfig, cluster: CredentialOptions | None = None, *, quiet: bool) -> None:
    """Warns before the model is loaded, which may take long. A certificate that clients refuse is reported despite --quiet, and
    served. `cluster`: has the certificate for other members of a cluster, which is read again after a change."""
    from baton.api.http.certificate_dates import certificate_warning

    certfile, now = (cluster or config).cluster_ssl_certfile, datetime.now(UTC)
    found = [certificate_warning(config.ssl_certfile, now)] if config.ssl_certfile else []
    found += [certificate_warning(certfile, now, "--cluster-ssl-certfile", "renew it")] if certfile else []
    for warned in found:
        if warned is not None and (warned.refused or not quiet):
            typer.echo(f"baton {command}: {'WARNING: ' if warned.refused else ''}{warned.text}", err=True)


def node_name(port: int) -> str:
    """A name that is stable across restarts and unique among instances."""
    host = "".join(each for each in gethostname() if each.isascii() and each.isprintable() and each != " ")
    return f"{host[: NODE_NAME_CHARACTERS_MAX - 6]}-{port}"


def run_server(config: ServeConfig, *, quiet: bool = False, until_stdin_ends: bool = False) -> bool:
    """Runs until Ctrl-C. Returns False if that came before the server was ready."""
    from baton.runtime.supervisor import Supervisor

    reporter = ServeReporter(config, quiet=quiet)

    async def run() -> None:
        supervisor = Supervisor(config, reporter.progress, reporter.ready, reporter.stopping, reporter.restarting)
        if until_stdin_ends:
            _on_end_of_stdin(supervisor.stop)
        await supervisor.run()
        ignore_further_signals()

    with closing(reporter.lines):
        with reporter.loading:
            asyncio.run(run())
        if reporter.was_ready and not quiet:
            reporter.lines.say("stopped")
    return reporter.was_ready


def _on_end_of_stdin(stop: Callable[[], None]) -> None:
    """Calls `stop` when stdin closes: the parent holds the other end of the pipe, which the system closes when it dies."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop()

    loop.add_reader(0, read)


class ServeReporter:
    """Prints the supervisor's reports."""

    def __init__(self, config: ServeConfig, *, quiet: bool) -> None:
        self._config = config
        self._quiet = quiet
        self._begin = monotonic()
        self.was_ready = False
        self.lines = ServerLines("serve")
        self.loading = ExitStack()
        "The stack that holds the bar. Closed as soon as loading ends: a live bar redraws itself over other output."
        self._stages = open_stages(self.lines.say, quiet=quiet)
        self.loading.callback(self._stages.close)
        self._stage = f"loading {config.served_model_name[0]}"
        self._stages.announce(self._stage, at_once=False)

    def progress(self, progress: LoadProgress) -> None:
        if self.was_ready:
            return
        stage = progress.stage or f"loading {self._config.served_model_name[0]}"
        if stage != self._stage:
            self._stage = stage
            self._stages.announce(stage, at_once=bool(progress.stage))
        self._stages.advance(progress.done, progress.total)

    def ready(self, ready: InstanceReady) -> None:
        self.was_ready = True
        self.loading.close()
        if self._quiet:
            return
        self.lines.show(ready_text(self._config, ready, monotonic() - self._begin))
        for warning in warnings_of(self._config, ready):
            self.lines.say(warning)

    def restarting(self, why: str) -> None:
        self.lines.say(f"{why}: starting another; open requests wait for it and go on")

    def stopping(self) -> None:
        self.loading.close()
        # The supervisor calls this after an error too; the error is printed where it is caught.
        if self.was_ready and not self._quiet and sys.exc_info()[0] is None:
            seconds = self._config.drain_seconds_max
            self.lines.say(f"draining: running requests have {seconds:g} s to finish; Ctrl-C again ends them now")


def ready_text(config: ServeConfig, ready: InstanceReady, seconds: float) -> str:
    member = bool(config.routers)
    admin = "" if config.admin_port is None else base_url(config, config.admin_host, config.admin_port)
    rows = [
        *([("instance", f"{config.name} ({config.role}), of router {', '.join(config.routers)}")] if member else ()),
        *([("health", f"{base_url(config, config.host, config.port)}/health")] if member else api_rows(config, ready)),
        *([("admin", f"{admin}/metrics")] if admin else ()),
        *model_rows(config, ready),
        *([("chosen", chosen_text(ready.plan))] if ready.plan.get("chosen_for_device") else ()),
        *([("tiers", tiers_text(ready.plan))] if "kv_host_blocks" in ready.plan else ()),
        *([("plan", plan_text(ready))] if ready.plan and config.log_level == "debug" else ()),
        *([] if member else [try_row(config, ready)]),
    ]
    return banner(f"serves {', '.join(config.served_model_name)}, ready in {seconds:.1f} s", rows, config)


def chosen_text(plan: dict[str, int | float | str]) -> str:
    """The step sizes that were chosen for the device, as text."""
    named = [f"{flag_of(name)} {plan[name]:g}" for name in str(plan["chosen_for_device"]).split(", ")]
    return f"{', '.join(named)}, for device {plan.get('device', 'cpu')}"


def tiers_text(plan: dict[str, int | float | str]) -> str:
    """The tiers below the KV cache, as text (docs/caching.md)."""
    storage = f" and {plan['kv_storage']}" if plan["kv_storage"] else ""
    host = f"{plan['kv_host_gib']} GiB of host memory ({plan['kv_host_blocks']:,} blocks)"
    return f"{host}{storage}; written {plan['kv_write']}, preempted KV: {plan['preempted_kv']}"


def plan_text(ready: InstanceReady) -> str:
    """The resolved settings as text, for developers of Baton; GET /config has all."""
    plan = ready.plan
    words = f"{plan['processes']}; KV pool of {plan['kv_pool_gib']} GiB ({plan['kv_cache_dtype']}) by {plan['kv_blocks_by']}"
    if "memory_gib" in plan:
        words += (
            f": of {plan['memory_gib']} GiB {plan['memory_used_gib']} are in use without it, "
            f"and a step needs {plan['memory_step_gib']} more"
        )
    attached = plan["pool_attached_by"]
    return words if attached == "nobody" else f"{words}; made by {plan['pool_created_by']}, attached by {attached}"


def warnings_of(config: ServeConfig, ready: InstanceReady) -> list[str]:
    found = []
    if (words := lowered_context(config, ready.context_tokens, ready.model_context_tokens)) is not None:
        found.append(words)
    if not config.api_key and config.host not in ("127.0.0.1", "localhost", "::1"):
        found.append(f"everybody who reaches {config.host}:{config.port} may use this server: give an --api-key")
    return found
