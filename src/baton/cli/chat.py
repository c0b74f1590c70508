"""`baton chat`: a conversation in the terminal.

server                 chosen when
the server at --url    the option is given; it must answer
the default port       a server answers there, and MODEL is not given or is served there
a private server       otherwise: `baton serve` on a free port of this machine (private_server.py), ended with the chat

stdout has only the answers. If stdin is not a terminal, each line is a turn: `echo Hello | baton chat`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from baton.cli.conversation import Conversation, talk
from baton.cli.http_stream import ServerAddress
from baton.cli.options import expanded
from baton.cli.private_server import accepts_name, models_at, private_server
from baton.cli.sampling_options import Sampling
from baton.cli.say import Failed, complaints, served_name
from baton.models.names import DEFAULT_MODEL

HELP = """Talk to a model in the terminal.

Uses the server at --url, or one that answers on port 8000, or starts one for itself.

\b
Examples:
  baton chat                              the default model
  baton chat Qwen/Qwen2.5-0.5B-Instruct   another one
  baton chat --url http://host:8000       a server that is running already
  echo 'Name three rivers.' | baton chat  one turn per line of input

In the chat: /reset forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops an answer.
"""
DEFAULT_URL = "http://127.0.0.1:8000"


@expanded
def chat(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model, as for baton serve.", show_default=False)] = None,
    *,
    named: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Same as MODEL.", hidden=True)] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="A server that is running already.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="API key for that server.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    sampling: Sampling,
) -> None:
    with complaints("chat"), ExitStack() as stack:
        if None not in (model, named) and model != named:
            raise Failed(f"two models: {model} and --model {named}; give one of them")
        server, name = _choose_server(stack, url, api_key, model or named)
        talk(Conversation(server, name, sampling.given(), system))


def _choose_server(stack: ExitStack, url: str | None, api_key: str | None, model: str | None) -> tuple[ServerAddress, str]:
    """Chooses or starts the server, and reports it on stderr."""
    server = ServerAddress(url or DEFAULT_URL, api_key)
    names = models_at(server)
    if url is not None and isinstance(names, str):
        raise Failed(f"{names}; start one with `baton serve`, or leave out --url")
    if not isinstance(names, str):
        chosen = names[0] if model is None else _served_name(server, model, names)
        if chosen is not None:
            also = "" if chosen in names else f" (it serves {', '.join(names)} under every name)"
            typer.echo(f"{chosen} at {server.url}{also}", err=True)
            return server, chosen
        if url is not None:
            raise Failed(f"{url} serves {', '.join(names)}, not {model}: name one of these, or leave out --url")
        typer.echo(f"{server.url} serves {', '.join(names)}: starting a server with {model} for this chat", err=True)
    else:
        typer.echo(f"no server at {server.url}: starting one with {model or DEFAULT_MODEL} for this chat", err=True)
    return stack.enter_context(private_server(model))


def _served_name(server: ServerAddress, model: str, names: list[str]) -> str | None:
    """The server's name of the model. None: it does not serve it. A server that accepts every name lists its own ones alone."""
    listed = next((name for name in (model, served_name(model)) if name in names), None)
    return listed or (model if accepts_name(server, model) else None)
