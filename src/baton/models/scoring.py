"""How a model scores a pair of texts, as its files say it.

    yes_no    a decoder of Qwen3-Reranker's kind: a question by template, and the logits of "yes" and "no" at its end
    vectors   an embedding model: the cosine of two vectors

A model of neither kind was not trained for it, and a request for scores is refused (api/rerank/). Qwen3-Reranker's folder is
that of an ordinary decoder: its name says what it is, or a module of sentence-transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from baton.models.files import read_json_list
from baton.models.pooling import pooling_by_gguf, pooling_by_hf

Scoring = Literal["yes_no", "vectors", ""]
YES_NO_ARCHITECTURES: Final = ("qwen3",)
LOGIT_MODULES: Final = ("LogitScore",)
"""Of sentence-transformers: the scores are logits of tokens."""
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


def _is_named_reranker(path: Path) -> bool:
    """A download has the name in one of the folders above its files."""
    return any("reranker" in part.lower() for part in path.parts[-4:])


def _has_logit_module(folder: Path) -> bool:
    if not (folder / "modules.json").is_file():
        return False
    modules = [module for module in read_json_list(folder / "modules.json") if isinstance(module, dict)]
    return any(str(module.get("type", "")).rpartition(".")[2] in LOGIT_MODULES for module in modules)
