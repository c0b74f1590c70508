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
      baton kv stat DIR            look at stored KV blocks
      baton simulate               rehearse random scenarios, with faults
    """
    open_standard_descriptors()


def open_standard_descriptors() -> None:
    """Who was started without one of them (`2>&-`) would give its number to the next socket, and a child would write what is
    meant for stderr into that."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


@app.command()
def version() -> None:
    """Print version and commit."""
    typer.echo(version_text())


def version_text() -> str:
    """What a bug report should name."""
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


COMMANDS = ("serve", "up", "router", "chat", "run", "pull", "rm", "list", "ps", "models", "bench", "kv", "simulate")
FUNCTIONS = {"list": "list_models"}
"""A command is a function of its own name in a file of that name, but for these."""
GROUPS = {"bench": "baton.cli.bench.command", "kv": "baton.cli.kv"}
# Where one is named only that one is imported: 0.12 s in place of 0.17 s, and 2 MiB less that a server keeps.
for _name in sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in COMMANDS else COMMANDS:
    _add_group(_name) if _name in GROUPS else _add(_name)

if __name__ == "__main__":
    app()
