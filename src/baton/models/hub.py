"""Downloads models of the Hugging Face hub by name.

owner/repo                        the folder with config.json and *.safetensors; else the GGUF file Q4_K_M, or the only one
owner/repo:QUANT                  the GGUF file of that quantisation (Q4_K_M, q8_0, ...), or of that file name
owner/repo@REVISION               a branch, a tag or a commit; also after :QUANT

Files go to the hub's own cache (hub_cache.py), so that other programs share them. The hub is queried every time, to find a
newer version; if it does not answer, the cache is used. Pickles and Python code are never fetched. The architecture is checked
first: nothing else is downloaded of an unsupported model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from baton.errors import ModelFileBroken, ModelNotFound, ModelUnsupported
from baton.models.download import SILENT, Listener, size_text, watched
from baton.models.files import read_json
from baton.models.hub_cache import CachedModel, cached_snapshots, repo_folder
from baton.models.support import GGUF_HEAD_BYTES, refuse_unsupported_config, refuse_unsupported_gguf

HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
WEIGHTS = "*.safetensors"
TEXT_FILES = ["*.json", "*.jinja"]
NOT_NEEDED = ["consolidated*", "original/*"]
"""Patterns of files that repeat the same weights in their authors' own format."""
HEAD_SECONDS_MAX = 20.0
QUANT_DEFAULT = "Q4_K_M"
QUANT = re.compile(r"(?:^|[-._])((?:I?Q\d\w*)|BF16|F16|F32)$", re.IGNORECASE)
PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class HubName:
    """owner/repo, with optional file and revision."""

    repo: str
    quant: str | None = None
    revision: str | None = None
    "Branch, tag or commit. None: the main branch."

    def __str__(self) -> str:
        return self.repo + (f":{self.quant}" if self.quant else "") + (f"@{self.revision}" if self.revision else "")


def hub_name(text: str) -> HubName | None:
    """The name's parts. None: not a hub name. A path that ends in .gguf is a missing file."""
    found = HUB_NAME.fullmatch(text)
    if found is None or found["repo"].endswith(".gguf") or ".." in (found["revision"] or ""):
        return None
    return HubName(found["repo"], found["quant"], found["revision"])


def fetch_from_hub(name: HubName, listener: Listener = SILENT, *, weights: bool = True) -> Path:
    """A folder, or a GGUF file, in the hub's cache. Without `weights` a folder may have none. Raises ModelUnsupported before
    any weights are downloaded, and ModelNotFound."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        if (cached := find_cached(name, weights=weights)) is not None:
            return cached
        raise ModelNotFound(
            f"{name}: not a local folder, and Hugging Face ids need the huggingface_hub package; "
            "`pip install huggingface_hub`, or download the model and name its folder"
        ) from None
    try:
        return _downloaded(name, listener, [*TEXT_FILES, WEIGHTS] if weights else TEXT_FILES)
    except (ModelFileBroken, ModelNotFound, ModelUnsupported):
        raise
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        if (cached := find_cached(name, weights=weights)) is not None:
            return cached
        raise ModelNotFound(
            f"{name}: not a local folder, and the Hugging Face hub did not give it ({type(error).__name__}: {error}). "
            "Check the name and the network, or download the model and name its folder"
        ) from error


def _downloaded(name: HubName, listener: Listener, patterns: list[str]) -> Path:
    """Downloads the missing files of a model and returns its folder, or its .gguf file. Progress goes to `listener`."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    listed = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in listed.siblings or ()}
    file = chosen_gguf(name, list(sizes))
    wanted = [file] if file is not None else [each for each in sizes if _is_needed(each, patterns)]
    folder = repo_folder(name.repo)
    missing = [each for each in wanted if not (folder / "snapshots" / str(listed.sha) / each).exists()]
    nbytes = sum(sizes[each] for each in missing)
    if missing:
        _refuse_unsupported(name, file)
        listener.announce(f"downloading {name} ({size_text(nbytes)})" if nbytes else f"downloading {name}")
    with watched(folder / "blobs", nbytes, listener.progress) if missing else nullcontext():
        if file is not None:
            return Path(hf_hub_download(name.repo, file, revision=name.revision))
        return Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=patterns, ignore_patterns=NOT_NEEDED))


def _is_needed(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file, each) for each in patterns) and not any(fnmatch(file, each) for each in NOT_NEEDED)


def _refuse_unsupported(name: HubName, gguf: str | None) -> None:
    """Checks the architecture in config.json, or in the first bytes of the GGUF file."""
    from huggingface_hub import hf_hub_download

    try:
        if gguf is None:
            config = Path(hf_hub_download(name.repo, "config.json", revision=name.revision))
            refuse_unsupported_config(read_json(config), f"{name}: config.json")
        elif head := _first_bytes(name, gguf, GGUF_HEAD_BYTES):
            refuse_unsupported_gguf(head, str(name))
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{error}. Its weights were not downloaded") from None


def _first_bytes(name: HubName, file: str, count: int) -> bytes:
    """Reads the first bytes by a range request; a server without ranges is read only that far. Empty: not available, and the
    file is checked after the download."""
    from huggingface_hub import hf_hub_url, utils

    url = hf_hub_url(name.repo, file, revision=name.revision)
    library: Any = utils
    headers = {**library.build_hf_headers(), "Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    session = library.get_session()
    head = b""
    try:
        if hasattr(session, "stream"):  # httpx, since version 1 of the hub's library; requests before
            opened = session.stream("GET", url, headers=headers, timeout=HEAD_SECONDS_MAX, follow_redirects=True)
        else:
            opened = session.get(url, headers=headers, timeout=HEAD_SECONDS_MAX, stream=True)
        with opened as answer:
            answer.raise_for_status()
            for piece in answer.iter_bytes() if hasattr(answer, "iter_bytes") else answer.iter_content(count):
                head += piece
                if len(head) >= count:
                    break
    except Exception:  # errors of several HTTP libraries, as in fetch_from_hub
        return b""
    return head[:count]


def find_cached(name: HubName, *, weights: bool = True) -> Path | None:
    """The cached files of the revision, as it was when last fetched. `weights`: as in fetch_from_hub."""
    for snapshot in cached_snapshots(name.repo, name.revision):
        files = [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob("*")) if path.is_file()]
        if not weights and name.quant is None and "config.json" in files:
            return snapshot
        try:
            file = chosen_gguf(name, files)
        except (ModelNotFound, ModelUnsupported):
            continue
        if file is not None:
            return snapshot / file
        if any(each.endswith(".safetensors") for each in files):
            return snapshot
    return None


def matches_name(name: HubName, model: CachedModel) -> bool:
    """Whether the name refers to this cached model."""
    if name.repo != model.repo:
        return False
    if name.revision is not None and name.revision not in model.revisions and not model.commit.startswith(name.revision):
        return False
    if name.quant is None:
        return True
    return model.file is not None and name.quant.upper() in (quant_of(model.file).upper(), Path(model.file).name.upper())


# GGUF files of a repository


def chosen_gguf(name: HubName, files: Sequence[str]) -> str | None:
    """The file that the name refers to. None: the whole folder. Raises ModelNotFound."""
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
    """The text after the colon for this file: its quantisation, or its name if that has none."""
    found = QUANT.search(PART.sub("", Path(file).stem))
    return found[1].upper() if found else Path(file).name
