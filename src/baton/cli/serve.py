"""`baton serve`: settings, port, model; then the supervisor runs everything, and this file says what goes on.

settings   flags over file over defaults (settings.py)      wrong: one line, exit 1, nothing was started
port       tried before anything is loaded                  taken: one line, exit 1
model      fetched with a bar, if it is not here yet
load       front, engine and worker start                   bar from the worker's progress
ready      address, a curl line, the facts                  on stdout
Ctrl-C     running requests finish, then all processes end  exit 0
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import replace
from inspect import Signature
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from baton import __version__
from baton.cli.say import INTERRUPTED, Advance, Failed, bar, complaints, resolve_model, served_name
from baton.cli.settings import parameters, read_config
from baton.config import ServeConfig

if TYPE_CHECKING:
    from baton.protocol.control import InstanceReady, LoadProgress


HELP = """Serve a model: OpenAI API, chat page and metrics on one port.

\b
Examples:
  baton serve                                 a small model, on port 8000
  baton serve Qwen/Qwen2.5-0.5B-Instruct      from the Hugging Face hub
  baton serve ./model.gguf --port 8001        a file
  baton serve --config serve.yaml             options as keys; flags win
  baton serve --host 0.0.0.0 --api-key KEY    for other machines

Ctrl-C lets running requests finish and then ends every process. Environment variables are not read.
"""


def serve(**given: Any) -> None:
    with complaints("serve"):
        asked = read_config(given)
        asked.engine()  # contradictions are said before anything is fetched or started
        config = replace(asked, port=usable_port(asked))
        path = resolve_model(config.model)
        config = replace(config, model=str(path), served_model_name=config.served_model_name or served_name(asked.model))
        if not run_server(config):
            raise typer.Exit(INTERRUPTED)


# typer asks for the signature; this one is made from the fields of ServeConfig
serve.__signature__ = Signature(parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters()}


def usable_port(config: ServeConfig) -> int:
    """The port, if it can be listened on now; for 0, one that is free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
            return int(sock.getsockname()[1])
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Failed(
            f"cannot listen on {config.host}:{config.port} ({why}); end the program that listens there, or give another "
            f"--port (--port 0 takes a free one)"
        ) from None


def run_server(config: ServeConfig) -> bool:
    """Until Ctrl-C. False: it came before the server was ready."""
    from baton.runtime.supervisor import Supervisor

    begin = monotonic()
    teller = Teller(config, begin)

    async def run() -> None:
        with bar(f"loading {config.served_model_name}", unit="bytes") as advance:
            teller.advance = advance
            await Supervisor(config, teller.progress, teller.ready, teller.stopping).run()

    asyncio.run(run())
    if teller.was_ready:
        typer.echo("baton serve: stopped", err=True)
    return teller.was_ready


class Teller:
    """What the supervisor tells, in words."""

    def __init__(self, config: ServeConfig, begin: float) -> None:
        self._config = config
        self._begin = begin
        self.was_ready = False
        self.advance: Advance = lambda done, total, note: None

    def progress(self, progress: LoadProgress) -> None:
        if not self.was_ready:
            self.advance(progress.done, progress.total, "")

    def ready(self, ready: InstanceReady) -> None:
        self.was_ready = True
        typer.echo(ready_text(self._config, ready, monotonic() - self._begin))
        for warning in warnings_of(self._config, ready):
            typer.echo(f"baton serve: {warning}", err=True)

    def stopping(self) -> None:
        # The supervisor calls this on its way out of an error too; that is said by whoever catches it.
        if self.was_ready and sys.exc_info()[0] is None:
            seconds = self._config.drain_seconds_max
            typer.echo(
                f"baton serve: draining: requests that run have {seconds:g} s to finish; Ctrl-C again ends at once", err=True
            )


def base_url(config: ServeConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{config.port}"


def ready_text(config: ServeConfig, ready: InstanceReady, seconds: float) -> str:
    url, name = base_url(config), config.served_model_name
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    tokens = ready.blocks * ready.block_size
    rows = (
        ("chat page", f"{url}/"),
        ("API", f"{url}/v1"),
        ("model", f"{config.model} ({config.dtype}, {ready.context_tokens:,} tokens of context)"),
        ("KV cache", f"{ready.blocks:,} blocks of {ready.block_size} tokens ({tokens:,}); {ready.slots} sequences at once"),
        ("try", f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"),
    )
    lines = [f"Baton {__version__} serves {name}, ready in {seconds:.1f} s"]
    return "\n".join([*lines, *(f"  {what:<10} {value}" for what, value in rows), "Ctrl-C ends it."])


def warnings_of(config: ServeConfig, ready: InstanceReady) -> list[str]:
    found = []
    tokens = ready.blocks * ready.block_size
    if tokens < ready.context_tokens:
        found.append(
            f"the KV pool holds {tokens:,} tokens and the model could take {ready.context_tokens:,}: requests that do not "
            "fit are refused; raise --kv-blocks, or give the limit with --context-tokens-max"
        )
    if not config.api_key and config.host not in ("127.0.0.1", "localhost", "::1"):
        found.append(f"everybody who reaches {config.host}:{config.port} may use this server: give an --api-key")
    return found
