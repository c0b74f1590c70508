"""The pooling of embeddings that a model's files state.

    folder      modules.json and 1_Pooling/config.json, as sentence-transformers writes them
    GGUF file   <architecture>.pooling_type, as llama.cpp writes it

The quality of vectors depends on it: a model trained for the last token (Qwen3-Embedding) silently gives poor vectors with the
mean. An unsupported pooling is passed on by its name, and a request that does not choose another is refused
(api/embeddings/shape.py). A model without a statement was not trained for embeddings: the default is the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from baton.errors import ModelFileBroken
from baton.models.files import read_json, read_json_list

UNSTATED: Final = "mean"
"""Pooling of models without a statement."""

OUR_NAMES: Final[Mapping[str, str]] = {
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "last": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean",  # differs in length only, and every vector is scaled to length 1
    "mean_sqrt_len": "mean",
}
GGUF_NAMES: Final[Mapping[int, str]] = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Values of llama.cpp's enum; 0 means no pooling."""
MODE: Final = "pooling_mode"
HARMLESS_MODULES: Final = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that do not change a vector's direction; all vectors are scaled to length 1."""


def pooling_by_hf(folder: Path) -> str:
    """Pooling of a Hugging Face folder. Empty: the folder has no statement."""
    path = folder / "1_Pooling"
    if (folder / "modules.json").is_file():
        modules = [module for module in read_json_list(folder / "modules.json") if isinstance(module, dict)]
        kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
        if others := sorted(set(kinds) - set(HARMLESS_MODULES)):
            return f"a module that is not there ({', '.join(others)})"
        if "Pooling" not in kinds:
            return ""
        path = folder / kinds["Pooling"]
    return _of_config(path / "config.json") if (path / "config.json").is_file() else ""


def _of_config(path: Path) -> str:
    """Pooling of a module's config: a name under `pooling_mode`, or a flag per mode. Several modes mean concatenated vectors.
    Raises ModelFileBroken."""
    config = read_json(path)
    if isinstance(named := config.get(MODE), str):
        return OUR_NAMES.get(named, named)
    chosen = [name.removeprefix(f"{MODE}_") for name, flag in config.items() if name.startswith(f"{MODE}_") and flag is True]
    if not chosen:
        raise ModelFileBroken(f"{path}: no pooling mode is chosen")
    return " and ".join(OUR_NAMES.get(name, name) for name in chosen)


def pooling_by_gguf(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    return GGUF_NAMES.get(kind, f"number {kind}") if isinstance(kind, int) else f"{kind!r}"
