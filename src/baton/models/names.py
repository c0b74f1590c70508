"""Resolves a user's model name to files on this machine.

tried in this order    example                        becomes
a .gguf file           ./SmolLM2.Q4_1.gguf            itself
a folder               /models/qwen2                  itself, or the one .gguf file in it
an alias               smollm2                        a file in our cache, fetched if missing (aliases.py)
a Hugging Face id      Qwen/Qwen2.5-0.5B-Instruct     a folder in the hub's cache, fetched if missing (hub.py)
                       owner/repo:Q4_K_M@v1           a .gguf file of that quantisation and revision
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from baton.config.values import DRAFT, draft_model_of
from baton.errors import ModelFileBroken, ModelLoadError, ModelNotFound, ModelUnsupported
from baton.models.aliases import ALIASES, cache_folder, fetch
from baton.models.download import SILENT, Listener
from baton.models.files import is_pickle, unreadable
from baton.models.hub import fetch_from_hub, hub_name

DEFAULT_MODEL = "smollm2"


def resolve(
    name: str | Path,
    *,
    revision: str = "",
    cache: Path | None = None,
    listener: Listener = SILENT,
    weights: bool = True,
) -> Path:
    """Path of the named model: a folder with a config.json, or a .gguf file. `revision`: for a hub name without one.
    `listener`: called during a download. Without `weights` those of a folder are not downloaded. Raises ModelNotFound."""
    if not str(name).strip():  # an empty name, e.g. from an unset variable, is not the current folder
        raise ModelNotFound("the name of the model is empty")
    path = Path(name).expanduser()
    if revision:
        name = _with_revision(name, path, revision)
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            return _check_file(path)
    except PermissionError as error:
        raise unreadable(path, error) from None
    if str(name) in ALIASES:
        return fetch(ALIASES[str(name)], cache or cache_folder(), listener)
    if (on_hub := hub_name(str(name))) is not None:
        found = fetch_from_hub(on_hub, listener, weights=weights)
        return found if found.is_file() else _in_folder(found)
    close = get_close_matches(str(name), ALIASES, n=1, cutoff=0.75)
    raise ModelNotFound(
        f"{name}: no such model; {f'did you mean {close[0]}? Else ' if close else ''}give a folder with a config.json, a .gguf "
        f"file, a Hugging Face id (owner/model, owner/model:QUANT) or an alias ({', '.join(ALIASES)})"
    )


def with_draft_files(speculate: str, files_of: Callable[[str], Path]) -> str:
    """The setting with the files of the draft model, if there is one, in place of its name. Errors name the setting: the main
    model's are alike."""
    name = draft_model_of(speculate)
    if not name:
        return speculate
    try:
        return f"{DRAFT}{files_of(name)}"
    except ModelLoadError as error:
        raise type(error)(f"--speculate {speculate}: {error}") from error


def _with_revision(name: str | Path, path: Path, revision: str) -> str:
    on_hub = None if path.exists() or str(name) in ALIASES else hub_name(f"{name}@{revision}")
    if on_hub is None:
        raise ModelNotFound(f"{name}: a revision ({revision}) is of a Hugging Face id, like owner/model, that has none yet")
    return str(on_hub)


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFound(f"{folder}: {len(ggufs)} .gguf files; name one: {', '.join(path.name for path in ggufs)}")
    raise ModelNotFound(f"{folder}: neither a config.json nor a .gguf file is there")


def _check_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    if is_pickle(path):
        raise ModelUnsupported(
            f"{path}: pickle files can run any code when opened and are never read; supported are safetensors and GGUF"
        )
    if path.suffix == ".safetensors":
        raise ModelFileBroken(f"{path}: tensors alone do not say what model they are; name the folder with config.json")
    raise ModelUnsupported(f"{path}: not a model file that we know; supported are .gguf files and folders")
