"""The way in which a model scores a pair of texts, according to its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from baton.models.encoders.config import ClassHead
from baton.models.files import read_json_list
from baton.models.pooling import pooling_by_gguf, pooling_by_hf

Scoring = Literal["yes_no", "vectors", "sigmoid", "logit", "softmax", "sigmoids", ""]
YES_NO_ARCHITECTURES: Final = ("qwen3",)
LOGIT_MODULES: Final = ("LogitScore",)
"""Modules of sentence-transformers whose scores are logits of tokens."""
RERANK_TEMPLATE: Final = "tokenizer.chat_template.rerank"


def scoring_by_hf(folder: Path, architecture: str) -> Scoring:
    if architecture in YES_NO_ARCHITECTURES and (_is_named_reranker(folder) or _has_logit_module(folder)):
        return "yes_no"
    return "vectors" if pooling_by_hf(folder) else ""


def scoring_by_gguf(path: Path, architecture: str, metadata: Mapping[str, Any]) -> Scoring:
    pooling = pooling_by_gguf(metadata)
    named = _is_named_reranker(path) or "rerank" in str(metadata.get("general.name", "")).lower()
    if architecture in YES_NO_ARCHITECTURES and (named or pooling == "rank" or RERANK_TEMPLATE in metadata):
        return "yes_no"
    return "vectors" if pooling and pooling != "rank" else ""


def scoring_of_head(head: ClassHead | None) -> Scoring:
    """The scoring of an encoder, by its head."""
    if head is None:
        return "vectors"
    if len(head.labels) > 1:
        return "sigmoids" if head.multi_label else "softmax"
    return "sigmoid" if head.sigmoid else "logit"


def _is_named_reranker(path: Path) -> bool:
    """Whether one of the folders above the files has the name, as in a download."""
    return any("reranker" in part.lower() for part in path.parts[-4:])


def _has_logit_module(folder: Path) -> bool:
    if not (folder / "modules.json").is_file():
        return False
    modules = [module for module in read_json_list(folder / "modules.json") if isinstance(module, dict)]
    return any(str(module.get("type", "")).rpartition(".")[2] in LOGIT_MODULES for module in modules)
