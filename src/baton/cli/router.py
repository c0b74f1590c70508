"""`baton router`: reads settings, checks ports, loads the tokenizer, runs the router, and prints its reports."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.banner import api_rows, banner, base_url, model_rows, try_row
from baton.cli.cluster_options import PlacementOptions, RouterOptions
from baton.cli.key_files import with_key_files
from baton.cli.say import INTERRUPTED, Failed, complaints, ignore_further_signals, require_packages, resolve_model, with_model
from baton.cli.serve import checked_port, warn_of_certificate
from baton.cli.settings import Given, parameters
from baton.config import ServeConfig
from baton.config.parts import part_of
from baton.config.schema import GROUPS, Setting, all_settings

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady

HELP = """Serve the API in front of instances that other commands start: it has no model of its own to compute with.

\b
Examples:
  (umask 077; head -c 32 /dev/urandom | base64 > secret)
  baton router --cluster-secret secret
  baton serve --role prefill --router tcp://127.0.0.1:8100 \\
    --cluster-secret secret --port 8001
  baton serve --role decode --router tcp://127.0.0.1:8100 \\
    --cluster-secret secret --port 8002

The model is needed for its tokenizer and chat template; it must be the one that the instances serve. Until
the first instance has joined, requests get 503. Ctrl-C lets running requests finish.
"""

OURS = (
    *(
        "model",
        "revision",
        "served_model_name",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "order",
        "drain_seconds_max",
        "shutdown_delay",
        "start_seconds_max",
    ),
    *GROUPS["Server"],
    *GROUPS["Administration"],
    *GROUPS["Queue"],
)
"""Options of `baton serve` that do not concern an engine."""


def settings() -> list[Setting]:
    served = [setting for setting in all_settings(ServeConfig) if setting.name in OURS]
    return [*all_settings(RouterOptions), *all_settings(PlacementOptions), *served]


def router(*, quiet: bool, **given: Any) -> None:
    with complaints("router"):
        require_packages()
        read = Given(given, settings(), quiet=quiet)
        options, placement = read.read(RouterOptions), read.read(PlacementOptions)
        asked = with_key_files(read.read(ServeConfig))
        require_secret(options)
        serve = replace(asked, port=checked_port(asked), log_level="error" if quiet else asked.log_level)
        warn_of_certificate("router", serve, options, quiet=quiet)
        options = replace(options, cluster_port=checked_cluster_port(options, serve))
        path = resolve_model(serve.model, serve.revision, command="router", quiet=quiet, weights=False)
        serve = with_model(serve, path)
        if not run_router(serve, placement, options, quiet=quiet):
            raise typer.Exit(INTERRUPTED)


def _own_options() -> list[Parameter]:
    quiet = typer.Option("--quiet", help="Print nothing but errors.")
    return [Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, quiet])]


_PARAMETERS = [*parameters(settings()), *_own_options()]
router.__signature__ = Signature(_PARAMETERS)  # type: ignore[attr-defined]
router.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}


def require_secret(options: RouterOptions) -> None:
    from baton.runtime.credentials import credentials_of

    if not options.cluster_secret:
        raise Failed(
            "--cluster-secret FILE is missing; make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), "
            "and give all of the cluster the same"
        )
    credentials_of(options)


def checked_cluster_port(options: RouterOptions, serve: ServeConfig) -> int:
    from baton.runtime.wire.listener import usable_port

    if options.cluster_port and options.cluster_port in (serve.port, serve.admin_port):
        raise Failed(f"--cluster-port {options.cluster_port} is the port of the API: give another one")
    return usable_port(options.cluster_host, options.cluster_port, "cluster-")


def run_router(serve: ServeConfig, placement: PlacementOptions, options: RouterOptions, *, quiet: bool) -> bool:
    """Runs until Ctrl-C. Returns False if that came before an instance had joined."""
    from baton.addresses import Address
    from baton.cli.cluster_view import PlainReporter
    from baton.config.router_process import RouterProcessConfig
    from baton.runtime.up import UpConfig, UpGroup

    address = str(Address(host=options.cluster_host.strip("[]"), port=options.cluster_port))

    def text(ready: InstanceReady, seconds: float) -> str:
        return ready_text(serve, address, ready)

    reporter = PlainReporter("router", text, drain_seconds=serve.drain_seconds_max, quiet=quiet)
    secret = options.cluster_secret
    config = part_of(options, RouterProcessConfig, serve=serve, router=placement.router(serve), listen=address)

    async def run() -> None:
        await UpGroup(UpConfig(router=config, engines={}), reporter).run()
        ignore_further_signals()

    reporter.say(f"instances are expected at {address}: baton serve --role ROLE --router {address} --cluster-secret {secret}")
    with closing(reporter.lines):
        asyncio.run(run())
        if reporter.was_ready and not quiet:
            reporter.lines.say("stopped")
    return reporter.was_ready


def ready_text(serve: ServeConfig, address: str, ready: InstanceReady) -> str:
    rows = [
        *api_rows(serve, ready),
        ("cluster", f"{base_url(serve, serve.host, serve.port)}/v1/cluster; instances join at {address}"),
        *model_rows(serve, ready, each=", each instance"),
        try_row(serve, ready),
    ]
    return banner(f"routes requests for {serve.served_model_name[0]}; the first instance has joined", rows, serve)
