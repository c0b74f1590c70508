"""Opens and loads the model of `--speculate draft:MODEL`. What cannot work is refused before any weights are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from baton.config import WorkerConfig
from baton.errors import InvalidConfig, ModelUnsupported
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.kvpool.pool import pool_bytes
from baton.models.loaders.weights import Progress
from baton.models.open import Opened, OpenedEncoder, OpenedModel
from baton.text.tokenizer import Tokenizer
from baton.worker.drafters.model import ModelDrafter
from baton.worker.executors.base import LoadedExecutor
from baton.worker.kv_layout import kv_layout
from baton.worker.platforms.base import Platform

log = logging.getLogger(__name__)


def draft_settings(config: WorkerConfig, name: str) -> WorkerConfig:
    """The settings of a worker, for its draft model of this name. Raises InvalidConfig."""
    if config.device not in ("cpu", "cuda"):
        raise InvalidConfig(
            f"--speculate {config.speculate}: a draft model needs --device cpu or cuda; else take ngram, grammar or auto"
        )
    # The heads of the draft model may have a width that int8 does not support.
    kv_dtype = "auto" if config.kv_dtype == "int8" else config.kv_dtype
    # A draft may differ by rounding: the main model verifies it.
    return replace(config, model=name, model_shape="", speculate="none", kv_dtype=kv_dtype, deterministic=False)


class MainModel(NamedTuple):
    """Sizes of the main model that its drafter must match."""

    blocks: int
    "Blocks of its pool."
    context_tokens: int
    "Maximum length of a sequence."
    vocabulary: int
    "Width of its head."


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The files of a draft model that fits its main model."""

    opened: OpenedModel
    settings: WorkerConfig
    layout: KVLayout

    def load(self, platform: Platform, progress: Progress | None = None) -> LoadedExecutor:
        """Raises InvalidConfig, and ModelUnsupported."""
        try:
            return platform.load(self.opened, self.settings, progress)
        except (InvalidConfig, ModelUnsupported) as error:
            raise type(error)(f"--speculate draft:{self.settings.model}: {error}") from error

    def drafter(self, platform: Platform, loaded: LoadedExecutor, main: MainModel) -> ModelDrafter:
        pool = platform.create_pool(self.layout, main.blocks)
        assert loaded.drafting is not None
        passes = loaded.drafting(pool, main.context_tokens)
        return ModelDrafter(passes, pool, slots=self.settings.slots, vocabulary=main.vocabulary)

    def plan(self, blocks: int) -> dict[str, int | float | str]:
        """The plan of the draft model's pool as text, shown beside that of the main model's pool."""
        return {
            "draft_model": self.settings.model,
            "draft_context_tokens": self.opened.config.context_tokens_max,
            "draft_kv_cache_dtype": self.layout.dtype,
            "draft_kv_pool_gib": round(pool_bytes(self.layout, blocks) / GIB, 3),
        }


def draft_model(
    platform: Platform, settings: WorkerConfig, opened: Opened, main: OpenedModel, tokenizer: Tokenizer | None = None
) -> DraftModel:
    """The draft model with its files. `settings`: of the draft model, whose files are `opened`. `tokenizer`: the main model's,
    if it is already loaded. Raises InvalidConfig."""
    if isinstance(opened, OpenedEncoder):
        raise InvalidConfig(f"--speculate draft:{settings.model}: the model is an encoder, which drafts no tokens")
    difference = vocabulary_difference(
        tokenizer or Tokenizer.from_path(main.path),
        Tokenizer.from_path(opened.path),
        min(main.config.vocab_size, opened.config.vocab_size),
    )
    if difference:
        raise InvalidConfig(
            f"--speculate draft:{settings.model}: a draft model must have the main model's vocabulary, and {difference}: "
            "take a smaller model of the same family"
        )
    kind = platform.kv_kind(opened.config, settings)
    return DraftModel(opened, settings, kv_layout(opened.config, settings.block_size, kind))


def vocabulary_difference(main: Tokenizer, draft: Tokenizer, width: int) -> str:
    """The first token below `width` that differs in the draft model's vocabulary, in words. Empty: none. Heads may be wider
    than the vocabulary, each by another number."""
    texts = [[one.id_to_bytes(token) for token in range(min(one.vocab_size, width))] for one in (main, draft)]
    for token, (mine, its) in enumerate(zip_longest(*texts, fillvalue=b"")):
        if mine != its:
            return f"token {token} is {_shown(mine)} in the main model and {_shown(its)} in the draft model"
    special = sorted(token for token in main.special_ids ^ draft.special_ids if token < width)
    return f"token {special[0]} is special in one of them only" if special else ""


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace")) if text else "no token"


def warn_of_context(draft: DraftModel, context_tokens: int) -> None:
    """Warn that longer sequences have no drafts."""
    most = draft.opened.config.context_tokens_max
    if most < context_tokens:
        log.warning(
            "the draft model was made for %s tokens, and sequences may have %s: there are no drafts behind the first %s",
            *(f"{most:,}", f"{context_tokens:,}", f"{most:,}"),
        )
