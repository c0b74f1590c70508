"""`baton pull`: downloads models in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.say import complaints, resolve_model
from baton.models.download import size_text

HELP = """Fetch models, so that `baton serve` finds them here. Prints where each one is.

\b
Examples:
  baton pull smollm2                        an alias
  baton pull Qwen/Qwen2.5-0.5B-Instruct     from the Hugging Face hub
  baton pull owner/repo-GGUF:Q4_K_M         one GGUF file of a repository
  baton pull owner/repo@v1.0                a branch, a tag or a commit
"""


def pull(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names, as after `baton serve`.", show_default=False)],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    with complaints("pull"):
        for model in models:
            path = resolve_model(model, command="pull", quiet=quiet)
            if not quiet:
                typer.echo(f"{model}: {path} ({size_text(_bytes_of(path))})")


def _bytes_of(path: Path) -> int:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
