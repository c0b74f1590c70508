"""From what a user types to files on this machine.

tried in this order    example                        becomes
a .gguf file           ./SmolLM2.Q4_1.gguf            itself
a folder               /models/qwen2                  itself, or the one .gguf file in it
an alias               smollm2                        a file in our cache, fetched if need be (aliases.py)
a Hugging Face id      Qwen/Qwen2.5-0.5B-Instruct     a folder in the hub's cache, fetched if need be
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from baton.errors import ModelFileBroken, ModelNotFound, ModelUnsupported
from baton.models.aliases import ALIASES, cache_folder, fetch
from baton.models.files import is_pickle

DEFAULT_MODEL = "smollm2"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


def resolve(name: str | Path, *, cache: Path | None = None, progress: Callable[[int, int], None] | None = None) -> Path:
    """A folder with a config.json, or a .gguf file. `progress` is told (bytes done, bytes in all) while we fetch."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _check_file(path)
    if str(name) in ALIASES:
        return fetch(ALIASES[str(name)], cache or cache_folder(), progress)
    if HUB_ID.fullmatch(str(name)) and path.suffix != ".gguf":
        return _in_folder(_from_hub(str(name)))
    raise ModelNotFound(
        f"{name}: no such model; give a folder with a config.json, a .gguf file, a Hugging Face id (owner/model) or an "
        f"alias ({', '.join(ALIASES)})"
    )


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


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"{name}: not a local folder, and Hugging Face ids need the huggingface_hub package; "
            "`pip install huggingface_hub`, or download the model and name its folder"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client lets the errors of several HTTP libraries through
        raise ModelNotFound(
            f"{name}: not a local folder, and the Hugging Face hub did not give it ({type(error).__name__}: {error}). "
            "Check the name and the network, or download the model and name its folder"
        ) from error
