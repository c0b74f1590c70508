"""`baton list`: the models on this machine, like `ollama list`. `baton models` has more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.models import aliases, hub_models
from baton.cli.say import complaints, console, print_json
from baton.models.download import size_text

HELP = """List the models that are on this machine, and whether they can be served.

\b
Examples:
  baton list
  baton list --json

`baton models` also lists architectures and kinds of files; `baton pull` fetches a model, `baton rm` removes one.
"""


def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    with complaints("list"):
        rows = found_models()
        if as_json:
            print_json(rows)
        else:
            _print(rows)


def found_models() -> list[dict[str, Any]]:
    """Models on this machine: built-in ones first, downloaded or not."""
    rows = []
    for model in aliases():
        refused = unsupported(Path(model["path"])) if model["cached"] else ""
        rows.append({"name": model["name"], "nbytes": model["nbytes"], "cached": model["cached"], "refused": refused})
    for model in hub_models():
        refused = unsupported(Path(model["path"]))
        rows.append({"name": model["name"], "nbytes": model["nbytes"], "cached": True, "refused": refused})
    return rows


def unsupported(path: Path) -> str:
    """Reason why the model cannot be served. Empty: no known reason."""
    from baton.errors import EngineError
    from baton.models.support import refuse_unsupported

    try:
        refuse_unsupported(path)
    except EngineError as error:
        return str(error).removeprefix(f"{path}: ").removeprefix(f"{path / 'config.json'}: ")
    return ""


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("NAME", "SIZE", "SERVE IT WITH", box=None, pad_edge=False)
    for row in rows:
        how = f"no: {row['refused']}" if row["refused"] else f"baton serve {row['name']}"
        table.add_row(row["name"], size_text(row["nbytes"]), how + ("" if row["cached"] else "   (downloads it first)"))
    console().print(table)
