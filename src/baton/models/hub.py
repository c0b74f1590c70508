"""Models of the Hugging Face hub, by name.

owner/repo                        its folder with config.json and *.safetensors; of GGUF files Q4_K_M, or the only one
owner/repo:QUANT                  the GGUF file of that quantisation (Q4_K_M, q8_0, ...), or of that file name
owner/repo@REVISION               a branch, a tag or a commit; also behind :QUANT

Files go to the hub's own cache (hub_cache.py), so that other programs share them. The hub is asked every time, which costs a
moment and finds a newer version; where it does not answer, what is in the cache is used. Neither pickles nor Python code are
ever fetched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ModelNotFound, ModelUnsupported
from baton.models.hub_cache import CachedModel, cached_snapshots

HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
NOT_NEEDED = ["consolidated*", "original/*"]
"""The same weights once more, in their maker's own form."""
QUANT_DEFAULT = "Q4_K_M"
QUANT = re.compile(r"(?:^|[-._])((?:I?Q\d\w*)|BF16|F16|F32)$", re.IGNORECASE)
PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class HubName:
    """owner/repo, and what of it."""

    repo: str
    quant: str | None = None
    revision: str | None = None
    "None: the main branch."

    def __str__(self) -> str:
        return self.repo + (f":{self.quant}" if self.quant else "") + (f"@{self.revision}" if self.revision else "")


def hub_name(text: str) -> HubName | None:
    """None: no name of a hub's model. A path that ends in .gguf is a file that is not there."""
    found = HUB_NAME.fullmatch(text)
    if found is None or found["repo"].endswith(".gguf") or ".." in (found["revision"] or ""):
        return None
    return HubName(found["repo"], found["quant"], found["revision"])


def fetch_from_hub(name: HubName) -> Path:
    """A folder, or a GGUF file, in the hub's cache."""
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    except ImportError:
        if (cached := find_cached(name)) is not None:
            return cached
        raise ModelNotFound(
            f"{name}: not a local folder, and Hugging Face ids need the huggingface_hub package; "
            "`pip install huggingface_hub`, or download the model and name its folder"
        ) from None
    try:
        listed = HfApi().model_info(name.repo, revision=name.revision).siblings or []
        file = chosen_gguf(name, [each.rfilename for each in listed])
        if file is None:
            return Path(
                snapshot_download(name.repo, revision=name.revision, allow_patterns=HUB_FILES, ignore_patterns=NOT_NEEDED)
            )
        return Path(hf_hub_download(name.repo, file, revision=name.revision))
    except (ModelNotFound, ModelUnsupported):
        raise
    except Exception as error:  # the hub's client lets the errors of several HTTP libraries through
        if (cached := find_cached(name)) is not None:
            return cached
        raise ModelNotFound(
            f"{name}: not a local folder, and the Hugging Face hub did not give it ({type(error).__name__}: {error}). "
            "Check the name and the network, or download the model and name its folder"
        ) from error


def find_cached(name: HubName) -> Path | None:
    """What is here already, of the version that the revision meant when it was last fetched."""
    for snapshot in cached_snapshots(name.repo, name.revision):
        files = [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob("*")) if path.is_file()]
        try:
            file = chosen_gguf(name, files)
        except (ModelNotFound, ModelUnsupported):
            continue
        if file is not None:
            return snapshot / file
        if any(each.endswith(".safetensors") for each in files):
            return snapshot
    return None


def is_meant(name: HubName, model: CachedModel) -> bool:
    """Is it one of those that the name can stand for?"""
    if name.repo != model.repo:
        return False
    if name.revision is not None and name.revision not in model.revisions and not model.commit.startswith(name.revision):
        return False
    if name.quant is None:
        return True
    return model.file is not None and name.quant.upper() in (quant_of(model.file).upper(), Path(model.file).name.upper())


# GGUF files of a repository


def chosen_gguf(name: HubName, files: Sequence[str]) -> str | None:
    """Which of the files is meant. None: the folder as a whole."""
    ggufs = [file for file in files if file.lower().endswith(".gguf") and not Path(file).name.lower().startswith("mmproj")]
    if name.quant is None:
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            return None
        if not ggufs:
            raise ModelNotFound(f"{name}: neither safetensors with a config.json nor a .gguf file is there")
        return ggufs[0] if len(ggufs) == 1 else _of_quant(name, QUANT_DEFAULT, ggufs)
    exact = [file for file in ggufs if name.quant in (file, Path(file).name)]
    return exact[0] if exact else _of_quant(name, name.quant, ggufs)


def _of_quant(name: HubName, quant: str, ggufs: Sequence[str]) -> str:
    wanted = re.compile(rf"(?:^|[-._]){re.escape(quant)}$", re.IGNORECASE)
    matching = [file for file in ggufs if wanted.search(PART.sub("", Path(file).stem))]
    whole = [file for file in matching if not PART.search(Path(file).stem)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise ModelNotFound(f"{name}: {len(whole)} files are {quant}; name one of them: {_named(name, whole)}")
    if matching:
        raise ModelUnsupported(f"{name}: {quant} is in {len(matching)} parts, and a model must be one file: choose another")
    if not ggufs:
        raise ModelNotFound(f"{name}: there is no .gguf file in {name.repo}")
    raise ModelNotFound(f"{name}: no file is {quant}; there are {', '.join(sorted({quant_of(file) for file in ggufs}))}")


def _named(name: HubName, files: Sequence[str]) -> str:
    return ", ".join(f"{name.repo}:{Path(file).name}" for file in files)


def quant_of(file: str) -> str:
    """What is written behind the colon for it: its quantisation, or where the name has none, the name."""
    found = QUANT.search(PART.sub("", Path(file).stem))
    return found[1].upper() if found else Path(file).name
