"""`baton ps`: the model and the load of a running server.

route             content                                               allowed for
/v1/models        names, and since when                                 any API key
/metrics          requests, KV cache of a server                        an admin key; without any keys this machine
/v1/cluster       the same of each instance behind a router             the same
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from baton.cli.http_stream import HttpError, ServerAddress, get_json, get_text
from baton.cli.say import Failed, complaints, console, print_json

HELP = """Show what a running server serves: model, instances, requests, KV cache, uptime.

\b
Examples:
  baton ps
  baton ps --url http://host:8000 --api-key KEY     with an admin key
  baton ps --json
"""
DEFAULT_URL = "http://127.0.0.1:8000"
ASK_SECONDS = 5.0
SAMPLE = re.compile(r"^baton:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Serving:
    """State of one server. None: the server has not reported the value."""

    models: list[str]
    url: str
    uptime_seconds: float | None = None
    instances: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    "Share of the KV cache that requests hold, 0 to 1."


def ps(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Server to ask.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="API key, or admin key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    with complaints("ps"):
        found = server_status(ServerAddress(url, api_key))
        if as_json:
            print_json(asdict(found))
        else:
            _print(found)


def server_status(server: ServerAddress) -> Serving:
    """State of the server. Raises Failed if no server answers."""

    async def ask() -> Serving:
        async with asyncio.timeout(ASK_SECONDS):
            return await _ask_server(server)

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise Failed(f"{server.url} does not answer within {ASK_SECONDS:g} s") from None
    except HttpError as error:
        if not error.explained:
            raise Failed(f"{server.url} is no Baton server (GET /v1/models: {error.status}): give --url") from None
        raise Failed(f"{error}; start one with `baton serve`, or give --url") from None
    except (KeyError, TypeError, ValueError):
        raise Failed(f"{server.url} is no Baton server: give --url") from None


async def _ask_server(server: ServerAddress) -> Serving:
    entries = (await get_json(server, "/v1/models"))["data"]
    names = [str(entry["id"]) for entry in entries]
    created = [float(entry["created"]) for entry in entries if entry.get("created")]
    uptime = max(0.0, time.time() - min(created)) if created else None
    try:
        numbers = await _cluster_figures(server) or _server_figures(await get_text(server, "/metrics"))
    except HttpError:  # not allowed for this key, or not on this port
        numbers = {}
    return Serving(names, server.url, uptime, **numbers)


async def _cluster_figures(server: ServerAddress) -> dict[str, Any]:
    """Figures of a router's instances; empty if the server is not a router."""
    try:
        view = await get_json(server, "/v1/cluster")
    except HttpError as error:
        if error.status == 404:
            return {}
        raise
    each = [instance["stats"] for instance in view["instances"]]
    blocks = sum(stats["blocks_total"] for stats in each)
    return {
        "instances": len(each),
        "running": sum(stats["running"] for stats in each),
        "waiting": view["queued"] + sum(stats["waiting"] + stats["preempted"] for stats in each),
        "kv_used": sum(stats["blocks_held"] for stats in each) / blocks if blocks else 0.0,
    }


def _server_figures(metrics: str) -> dict[str, Any]:
    values = {name: float(value) for name, value in SAMPLE.findall(metrics)}
    return {
        "instances": 1,
        "running": int(values["requests_running"]),
        "waiting": int(values["requests_waiting"]),
        "kv_used": values["kv_usage_ratio"],
    }


def _print(found: Serving) -> None:
    from rich.table import Table

    def shown(value: float | None) -> str:
        return "-" if value is None else str(value)

    table = Table("MODEL", "INSTANCES", "RUNNING", "WAITING", "KV USED", "UPTIME", "URL", box=None, pad_edge=False)
    used = "-" if found.kv_used is None else f"{found.kv_used:.0%}"
    counts = map(shown, (found.instances, found.running, found.waiting))
    table.add_row(", ".join(found.models), *counts, used, duration_text(found.uptime_seconds), found.url)
    console().print(table)
    if found.running is None:
        typer.echo("requests and KV cache: give --api-key with an admin key (or --url with the admin port)", err=True)


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} days"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
