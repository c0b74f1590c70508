"""A private `baton serve` for one conversation: on a free port of this machine, with a random key."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import IO, Any
from urllib.parse import quote

from baton.cli.http_stream import HttpError, ServerAddress, get_json
from baton.cli.progress import stages
from baton.cli.say import Failed, resolve_model, served_name, stderr_lines
from baton.models.names import DEFAULT_MODEL

COMMAND = (sys.executable, "-m", "baton.cli.main")
PREFIX = "baton serve: "
ANSWER_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.1
DRAIN_SECONDS = 2.0
"""Seconds to drain: only the conversation uses the server, so no request is left to finish."""
STOP_SECONDS = 20.0


@contextmanager
def private_server(model: str | None, *, command: str = "chat", **settings: Any) -> Iterator[tuple[ServerAddress, str]]:
    """Runs a server that ends with this process, even if it is killed: it watches a pipe whose other end only this process
    holds.

    Its settings are in an inherited unnamed file: a process list shows arguments to all users, and a killed process would leave
    a named file behind.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    key = secrets.token_urlsafe(24)
    name = served_name(model or DEFAULT_MODEL)
    path = resolve_model(model or DEFAULT_MODEL, command=command)
    config: dict[str, Any] = {"model": str(path), "served_model_name": [name], "log_level": "error"}
    config |= {"host": "127.0.0.1", "port": port, "api_key": [key], "drain_seconds_max": DRAIN_SECONDS, **settings}
    with tempfile.TemporaryFile() as output:
        process = _start(config, output)
        server = ServerAddress(f"http://127.0.0.1:{port}", key)
        try:
            with stages(stderr_lines(command)) as shown:
                shown.announce(f"loading {name}", at_once=False)
                _wait_ready(server, process, output, shown.announce, f"loading {name}")
            yield server, name
        finally:
            _end(process)


def models_at(server: ServerAddress) -> list[str] | str:
    """Names of the served models, or the reason why there are none."""

    async def ask() -> list[str]:
        async with asyncio.timeout(ANSWER_SECONDS):
            return [str(entry["id"]) for entry in (await get_json(server, "/v1/models"))["data"]]

    try:
        return asyncio.run(ask()) or f"{server.url} serves no model"
    except TimeoutError:
        return f"{server.url} does not answer within {ANSWER_SECONDS:g} s"
    except HttpError as error:
        if error.status and not error.explained:  # the text of its error page does not help
            return f"{server.url} is no OpenAI-style server (GET /v1/models: {error.status})"
        return str(error)
    except (KeyError, TypeError):
        return f"{server.url} is no OpenAI-style server (GET /v1/models is answered with something else)"


def accepts_name(server: ServerAddress, name: str) -> bool:
    """Whether the server answers to a name, be it listed or not (--served-model-name '*')."""

    async def ask() -> bool:
        async with asyncio.timeout(ANSWER_SECONDS):
            found = await get_json(server, f"/v1/models/{quote(name)}")
            return isinstance(found, dict) and found.get("id") == name

    try:
        return asyncio.run(ask())
    except (TimeoutError, HttpError):
        return False


def _start(config: dict[str, Any], output: IO[bytes]) -> subprocess.Popen[bytes]:
    from baton.runtime.processes.children import nameless_file

    settings = nameless_file(json.dumps(config).encode())  # JSON is YAML
    try:
        return subprocess.Popen(
            [*COMMAND, "serve", "--config", f"/dev/fd/{settings}", "--until-stdin-ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=output,  # the terminal belongs to the chat
            pass_fds=[settings],
            start_new_session=True,  # Ctrl-C stops an answer, not the server
        )
    finally:
        os.close(settings)


def _wait_ready(
    server: ServerAddress, process: subprocess.Popen[bytes], output: IO[bytes], announce: Callable[[str], None], stage: str
) -> None:
    """Waits until the server is ready, and announces its stages (e.g. compiling). `stage`: the first one."""
    read = 0
    while process.poll() is None:
        lines = _lines(output)
        for line in lines[read:]:
            doing = line.removeprefix(PREFIX)
            if line.startswith(PREFIX) and not doing.startswith(f"{stage}:"):  # the same stage, some seconds later
                stage = doing
                announce(stage)
        read = len(lines)
        if not isinstance(models_at(server), str):
            return
        sleep(ASK_AGAIN_SECONDS)
    why = next(reversed(_lines(output)), "it ended without a word")
    raise Failed(f"the model could not be started: {why.removeprefix(PREFIX)}")


def _lines(output: IO[bytes]) -> list[str]:
    """Complete lines so far, read by pread: the server writes to the same open file, whose offset is shared."""
    text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
    return [line for line in text.split("\n")[:-1] if line.strip()]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
