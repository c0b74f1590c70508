"""The `baton` command."""

from __future__ import annotations

import typer

from baton import __version__
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
    Try it without a GPU:
      [bold]baton simulate[/bold]               rehearse 200 random scenarios, faults included
      [bold]baton simulate --help[/bold]        more examples
    """


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"baton {__version__}")


app.command(help=HELP)(simulate)

if __name__ == "__main__":
    app()
