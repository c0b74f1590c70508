"""The `baton` command."""

from __future__ import annotations

import typer

from baton import __version__
from baton.cli import chat as chatting
from baton.cli import models as listing
from baton.cli import run as running
from baton.cli import serve as serving
from baton.cli.bench import command as bench
from baton.cli.simulate import HELP, simulate

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def baton() -> None:
    """An LLM serving engine: whatever happens on the way, the client gets exactly the tokens of an undisturbed run, once.

    \b
    Examples:
      [bold]baton serve[/bold]                  serve a small model, with a chat page
      [bold]baton chat[/bold]                   talk to a model here
      [bold]baton run MODEL PROMPT[/bold]       one answer, without a server
      [bold]baton bench serve[/bold]            measure a server
      [bold]baton simulate[/bold]               rehearse 200 random scenarios, faults included
    """


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"baton {__version__}")


app.command("serve", help=serving.HELP)(serving.serve)
app.command("chat", help=chatting.HELP)(chatting.chat)
app.command("run", help=running.HELP)(running.run)
app.command("models", help=listing.HELP)(listing.models)
app.add_typer(bench.app, name="bench", help=bench.HELP)
app.command(help=HELP)(simulate)

if __name__ == "__main__":
    app()
