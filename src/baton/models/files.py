"""Files of a model: the interface of an open file, and checks that turn an obscure failure into a clear error."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ModelFileBroken

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
GIT_LFS_MAGIC = b"version https://git-lfs"


class MappedFile(Protocol):
    """A file of weights, in its state at opening."""

    path: Path
    buffer: mmap.mmap
    stat: os.stat_result


def is_pickle(path: Path) -> bool:
    return path.suffix.lower() in PICKLE_SUFFIXES


def refuse_git_lfs_pointer(path: Path) -> None:
    """Refuses the text file that a clone without LFS leaves in place of a large file."""
    try:
        with path.open("rb") as file:
            head = file.read(len(GIT_LFS_MAGIC))
    except OSError as error:
        raise unreadable(path, error) from None
    if head == GIT_LFS_MAGIC:
        raise ModelFileBroken(f"{path}: only a Git LFS pointer, not the file itself; run `git lfs pull`")


def unreadable(path: Path, error: OSError) -> ModelFileBroken:
    """The error for a file or folder that the system does not let us read."""
    advice = "; let the user who runs this read it" if isinstance(error, PermissionError) else ""
    return ModelFileBroken(f"{path}: cannot be read ({error.strerror or error}){advice}")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ModelFileBroken."""
    value = _json(path)
    if not isinstance(value, dict):
        raise ModelFileBroken(f"{path}: holds a {type(value).__name__}, not a table of settings")
    return value


def read_json_list(path: Path) -> list[Any]:
    value = _json(path)
    if not isinstance(value, list):
        raise ModelFileBroken(f"{path}: holds a {type(value).__name__}, not a list")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except PermissionError as error:
        raise unreadable(path, error) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileBroken(f"{path}: not readable as JSON ({error})") from error
