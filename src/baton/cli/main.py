"""The `baton` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from baton import __version__
from baton.cli.help import HelpfulTyper

app = HelpfulTyper(name="baton", pretty_exceptions_show_locals=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def baton(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print version and commit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """An LLM serving engine: whatever happens on the way, the client gets exactly the tokens of an undisturbed run, once.

    \b
    Examples:
      baton serve                  serve a small model, with a chat page
      baton up                     a cluster on this machine
      baton chat MODEL             talk to a model here
      baton run MODEL PROMPT       one answer, without a server
      baton pull MODEL             fetch a model (list shows them, rm removes)
      baton ps                     what a running server does
      baton bench serve            measure a server
      baton kv list DIR            look at stored KV blocks
      baton simulate               rehearse random scenarios, with faults
    """
    open_standard_descriptors()


def open_standard_descriptors() -> None:
    """Opens missing standard descriptors (`2>&-`): the next socket would get the number, and a child would write its stderr
    into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the descriptor gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


@app.command()
def version() -> None:
    """Print version and commit."""
    typer.echo(version_text())


def version_text() -> str:
    """Version and commit, for bug reports."""
    from baton.runtime.processes.build_info import commit

    return f"baton {__version__}" + (f" (commit {commit()})" if commit() else "")


def _add(name: str) -> None:
    function = FUNCTIONS.get(name, name)
    module = import_module(f"baton.cli.{function}")
    command: Callable[..., None] = getattr(module, function)
    app.command(name, help=module.HELP)(command)


def _add_group(name: str) -> None:
    module = import_module(GROUPS[name])
    app.add_typer(module.app, name=name, help=module.HELP)


COMMANDS = ("serve", "up", "down", "router", "chat", "run", "pull", "rm", "list", "ps", "models", "bench", "kv", "simulate")
FUNCTIONS = {"list": "list_models"}
"""Modules of commands whose function has another name."""
GROUPS = {"bench": "baton.cli.bench.command", "kv": "baton.cli.kv"}
# Only the named command is imported: 0.12 s instead of 0.17 s, and 2 MiB less memory of a server.
for _name in sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in COMMANDS else COMMANDS:
    _add_group(_name) if _name in GROUPS else _add(_name)

if __name__ == "__main__":
    app()
