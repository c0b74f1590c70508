"""`baton chat`: a conversation in the terminal.

who answers            chosen when
the server at --url    it is given; it must answer
the default port       something answers there, and --model is not given or is what it serves
a server of our own    else: `baton serve` on a free port of this machine, with a key nobody else knows, ended with the chat

stdout is for the answers alone. Where stdin is not a terminal, each line is a turn: `echo Hello | baton chat`.
Ctrl-C stops the answer that is being written; at the prompt it ends the chat.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import IO, Annotated, Any

import typer

from baton.cli.http_stream import HttpError, Server, get_json, stream_events
from baton.cli.sampling_options import Seed, Temperature
from baton.cli.say import Failed, complaints, resolve_model, served_name, waiting
from baton.models.names import DEFAULT_MODEL

HELP = """Talk to a model in the terminal.

Uses the server at --url, or one that answers on port 8000, or starts one for itself.

\b
Examples:
  baton chat                              the default model
  baton chat --model ./model.gguf         another one
  baton chat --url http://host:8000       a server that is running already
  echo 'Name three rivers.' | baton chat  one turn per line of input

In the chat: /reset forgets what was said, /exit ends (so does Ctrl-D); Ctrl-C stops an answer.
"""
DEFAULT_URL = "http://127.0.0.1:8000"
COMMAND = (sys.executable, "-m", "baton.cli.main")
LOOK_SECONDS = 2.0
LOOK_AGAIN_SECONDS = 0.1
DRAIN_SECONDS = 2.0
"""Nobody but the chat asks its own server, so there is nothing to finish when the chat ends."""
STOP_SECONDS = 20.0


@dataclass(slots=True)
class Conversation:
    """Everything said so far, and how to ask for more."""

    server: Server
    model: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def ask(self, text: str) -> str:
        """Prints the answer while it comes; returns a line about its speed. What was said counts only if all of it came."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        begin, times, said, usage = monotonic(), [], [], 0
        async with aclosing(stream_events(self.server, "/v1/chat/completions", {**body, **self.options})) as events:
            async for event in events:
                if event == b"[DONE]":
                    break
                content = json.loads(event)
                if "error" in content:
                    raise HttpError(str(content["error"].get("message", content["error"])))
                usage = (content.get("usage") or {}).get("completion_tokens", usage)
                for choice in content.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        times.append(monotonic())
                        said.append(piece)
                        typer.echo(piece, nl=False)
        typer.echo()
        self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        return speed(begin, times, usage or len(times))


def speed(begin: float, times: list[float], tokens: int) -> str:
    if not times:
        return "no text"
    rate = f", {(tokens - 1) / (times[-1] - times[0]):.1f} tok/s" if tokens > 1 and times[-1] > times[0] else ""
    return f"{tokens} tokens{rate}, first after {times[0] - begin:.2f} s"


def chat(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model, as for baton serve.")] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A server that is running already.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="API key for that server.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per answer, at most.")] = 512,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    asked = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in asked.items() if value is not None}
    with complaints("chat"), ExitStack() as stack:
        server, name = _who_answers(stack, url, api_key, model)
        _talk(Conversation(server, name, options, system))


# Who answers


def _who_answers(stack: ExitStack, url: str | None, api_key: str | None, model: str | None) -> tuple[Server, str]:
    if url is not None:
        names = _models_at(Server(url, api_key))
        if isinstance(names, str):
            raise Failed(f"{names}; start one with `baton serve`, or leave out --url")
        if model is not None and model not in names:
            raise Failed(f"{url} serves {', '.join(names)}, not {model}")
        return Server(url, api_key), model or names[0]
    names = _models_at(Server(DEFAULT_URL, api_key))
    if not isinstance(names, str) and (model is None or served_name(model) in names):
        name = names[0] if model is None else served_name(model)
        typer.echo(f"{name} at {DEFAULT_URL}", err=True)
        return Server(DEFAULT_URL, api_key), name
    return stack.enter_context(private_server(model))


def _models_at(server: Server) -> list[str] | str:
    """What is served there, or why nothing is."""

    async def ask() -> list[str]:
        async with asyncio.timeout(LOOK_SECONDS):
            return [str(entry["id"]) for entry in (await get_json(server, "/v1/models"))["data"]]

    try:
        return asyncio.run(ask()) or f"{server.url} serves no model"
    except TimeoutError:
        return f"{server.url} does not answer within {LOOK_SECONDS:g} s"
    except HttpError as error:
        if error.status in (404, 405, 501):  # its page about that is of no use
            return f"{server.url} is no OpenAI-style server (GET /v1/models: {error.status})"
        return str(error)
    except (KeyError, TypeError):
        return f"{server.url}/v1/models is not that of an OpenAI-style server"


@contextmanager
def private_server(model: str | None, **settings: Any) -> Iterator[tuple[Server, str]]:
    """A `baton serve` of our own, which ends when we do, however we end: it watches a pipe whose other end only we hold.

    Its settings are in an inherited file without a name: a process list shows arguments to everybody, and a file with
    a name would be left behind by a killed process.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    key = secrets.token_urlsafe(24)
    name = served_name(model or DEFAULT_MODEL)
    config: dict[str, Any] = {"model": str(resolve_model(model or DEFAULT_MODEL)), "served_model_name": [name]}
    config |= {"host": "127.0.0.1", "port": port, "api_key": [key], "drain_seconds_max": DRAIN_SECONDS, **settings}
    with tempfile.TemporaryFile() as said, waiting(f"loading {name}") as done:
        process = _start(config, said)
        server = Server(f"http://127.0.0.1:{port}", key)
        try:
            _wait_ready(server, process, said)
            done()
            yield server, name
        finally:
            _end(process)


def _start(config: dict[str, Any], said: IO[bytes]) -> subprocess.Popen[bytes]:
    from baton.runtime.children import nameless_file

    settings = nameless_file(json.dumps(config).encode())  # JSON is YAML
    try:
        return subprocess.Popen(
            [*COMMAND, "serve", "--config", f"/dev/fd/{settings}", "--quiet", "--until-stdin-ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,  # the terminal is the chat's alone
            pass_fds=[settings],
            start_new_session=True,  # Ctrl-C is ours: it stops an answer, not the server
        )
    finally:
        os.close(settings)


def _wait_ready(server: Server, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    while process.poll() is None:
        if not isinstance(_models_at(server), str):
            return
        sleep(LOOK_AGAIN_SECONDS)
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    why = next((line for line in reversed(lines) if line.strip()), "it ended without a word")
    raise Failed(f"the model could not be started: {why.removeprefix('baton serve: ')}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# The conversation


def _talk(conversation: Conversation) -> None:
    person = sys.stdin.isatty()
    if person:
        typer.echo(f"{conversation.model}: /reset forgets, /exit ends", err=True)
    for text in _turns(person):
        match text.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/reset":
                conversation.reset()
                typer.echo("forgotten", err=True)
                continue
        try:
            typer.echo(f"[{asyncio.run(conversation.ask(text))}]", err=True)
        except KeyboardInterrupt:
            typer.echo("\n[stopped]", err=True)
            if not person:
                raise
        except HttpError as error:
            if not person:
                raise Failed(str(error)) from None
            typer.echo(f"[{error}]", err=True)


def _turns(person: bool) -> Iterator[str]:
    if not person:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # arrows and history at the prompt

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
