"""The hub's cache on this machine: lists and removes models.

models--OWNER--REPO/
  refs/main                  commit of the branch when it was last fetched
  snapshots/COMMIT/FILE      a link into blobs, or a copy on systems without links
  blobs/HASH                 the bytes, which several commits may share

The layout is documented by the hub's library, which is not needed to read it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache that could be served."""

    repo: str
    file: str | None
    "A GGUF file. None: a folder with config.json and safetensors."
    commit: str
    revisions: tuple[str, ...]
    "Branches and tags that point to this commit."
    path: Path
    nbytes: int


def hub_folder() -> Path:
    """The cache folder of the Hugging Face client, from the same variables."""
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def repo_folder(repo: str) -> Path:
    return hub_folder() / f"models--{repo.replace('/', '--')}"


def cached_snapshots(repo: str, revision: str | None) -> list[Path]:
    """Snapshot folders of the revision, none or one; without a revision of the main branch, else of all commits."""
    folder = repo_folder(repo)
    ref = folder / "refs" / (revision or "main")
    commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    if commit is not None:
        return [path for path in (folder / "snapshots" / commit,) if path.is_dir()]
    return sorted(path for path in folder.glob("snapshots/*") if path.is_dir())


def cached_models() -> Iterator[CachedModel]:
    for folder in sorted(hub_folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(folder.glob("snapshots/*")):
            yield from _models_in(repo, folder, snapshot)


def _models_in(repo: str, folder: Path, snapshot: Path) -> Iterator[CachedModel]:
    refs = folder / "refs"
    named = [ref for ref in sorted(refs.rglob("*")) if ref.is_file() and ref.read_text().strip() == snapshot.name]
    revisions = tuple(str(ref.relative_to(refs)) for ref in named)
    files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    if weights and (snapshot / "config.json").is_file():
        nbytes = sum(path.stat().st_size for path in files if path.suffix != ".gguf")
        yield CachedModel(repo, None, snapshot.name, revisions, snapshot, nbytes)
    for path in files:
        if path.suffix.lower() == ".gguf":
            file = str(path.relative_to(snapshot))
            yield CachedModel(repo, file, snapshot.name, revisions, path, path.stat().st_size)


def remove(models: Sequence[CachedModel]) -> int:
    """Removes the models, and files that nothing else uses. Returns the freed bytes."""
    freed = 0
    for repo in dict.fromkeys(model.repo for model in models):
        folder = repo_folder(repo)
        before = _bytes_in(folder)
        for model in models:
            if model.repo == repo:
                _unlink(model)
        _sweep(folder)
        freed += before - _bytes_in(folder)
    return freed


def _unlink(model: CachedModel) -> None:
    if model.file is not None:
        model.path.unlink(missing_ok=True)
        return
    for path in sorted(model.path.rglob("*")):
        if path.suffix.lower() != ".gguf" and not path.is_dir():
            path.unlink()


def _sweep(folder: Path) -> None:
    """Removes empty snapshots, refs to missing commits, and unlinked blobs; the whole folder if nothing is left."""
    for snapshot in sorted(folder.glob("snapshots/*")):
        if not any(path.is_file() for path in snapshot.rglob("*")):
            shutil.rmtree(snapshot)
    commits = {path.name for path in folder.glob("snapshots/*")}
    if not commits:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for ref in [path for path in (folder / "refs").rglob("*") if path.is_file()]:
        if ref.read_text().strip() not in commits:
            ref.unlink()
    used = {path.resolve().name for path in folder.glob("snapshots/**/*") if path.is_symlink()}
    for blob in folder.glob("blobs/*"):
        if blob.name not in used:
            blob.unlink()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
