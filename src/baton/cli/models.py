"""`baton models`: names for `baton serve`, downloaded models, and supported kinds of files."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from baton.cli.say import complaints, console, print_json
from baton.models.download import size_text

HELP = """List models: aliases, what is in the caches, and what Baton can run.

\b
Examples:
  baton models
  baton models --json
"""


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    with complaints("models"):
        facts = {"aliases": aliases(), "hub": hub_models(), "architectures": architectures(), "files": file_kinds()}
        if as_json:
            print_json(facts)
        else:
            _print(facts)


def aliases() -> list[dict[str, Any]]:
    from baton.models.aliases import ALIASES, cache_folder

    found = []
    for name, model in ALIASES.items():
        path = cache_folder() / model.file
        # The size suffices here: the checksum is verified when the model is used.
        here = path.is_file() and path.stat().st_size == model.nbytes
        row = {"name": name, "file": model.file, "nbytes": model.nbytes, "from": model.requirement}
        found.append({**row, "cached": here, "path": str(path)})
    return found


def hub_models() -> list[dict[str, Any]]:
    """Downloaded models, with names as for `baton serve`."""
    from baton.models.hub import quant_of
    from baton.models.hub_cache import cached_models

    found = []
    for model in cached_models():
        name = model.repo if model.file is None else f"{model.repo}:{quant_of(model.file)}"
        revision = "" if "main" in model.revisions else f"@{(*model.revisions, model.commit)[0]}"
        found.append({"name": name + revision, "nbytes": model.nbytes, "commit": model.commit, "path": str(model.path)})
    return found


def architectures() -> list[dict[str, Any]]:
    from baton.models.encoders.families import FAMILIES
    from baton.models.registry import ARCHITECTURES
    from baton.models.text_part import WRAPPERS

    wrapped = {name: wrapper for wrapper, decoders in WRAPPERS.items() for name in decoders.values()}
    decoders = [
        (name, (*model.hf_names, *(wrapped[each] for each in model.hf_names if each in wrapped)), model.gguf_names)
        for name, model in ARCHITECTURES.items()
    ]
    encoders: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        (name, each.hf_names, ()) for name, each in FAMILIES.items()
    ]
    return [{"name": name, "config_json": list(hf), "gguf": list(gguf)} for name, hf, gguf in (*decoders, *encoders)]


def file_kinds() -> list[dict[str, Any]]:
    from baton.models.tensor_types import TENSOR_TYPES

    of_folders = ["F32", "F16", "BF16", "F8_E4M3"]
    return [
        {"kind": "folder", "holds": "config.json, tokenizer.json and *.safetensors", "types": of_folders},
        {"kind": ".gguf", "holds": "everything in one file", "types": [kind.name for kind in TENSOR_TYPES.values()]},
    ]


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)

    known = table("Aliases", "name", "size", "comes in", "here")
    for row in facts["aliases"]:
        here = row["path"] if row["cached"] else "no; fetched when it is first used"
        known.add_row(row["name"], size_text(row["nbytes"]), row["from"], here)
    cached = table("Hugging Face cache", "name", "size", "commit", "here")
    for row in facts["hub"]:
        cached.add_row(row["name"], size_text(row["nbytes"]), row["commit"][:12], row["path"])
    runs = table("Architectures", "name", "config.json", "GGUF")
    for row in facts["architectures"]:
        runs.add_row(row["name"], ", ".join(row["config_json"]), ", ".join(row["gguf"]))
    files = table("Files", "kind", "holds", "tensor types")
    for row in facts["files"]:
        files.add_row(row["kind"], row["holds"], ", ".join(row["types"]))
    shown = console()
    for part in (known, *([cached] if facts["hub"] else ()), runs, files):
        shown.print(part, "")
    typer.echo(
        "A folder or a .gguf file is named by its path, a hub model by its id (owner/model, owner/model:QUANT). "
        "Pickle files are never read. `baton pull` fetches a model, `baton rm` removes one."
    )
