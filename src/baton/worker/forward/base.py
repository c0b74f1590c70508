"""What the model runner asks of a model, whatever computes it. Numpy on both sides: nobody above knows of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.base import Pool
from baton.kvpool.layout import KVKind
from baton.models.config import ModelConfig
from baton.protocol.progress import ProgressWord
from baton.worker.arrays import Floats, Int64s
from baton.worker.draws import Draws
from baton.worker.flat_batch import FlatBatch
from baton.worker.token_masks import Masks


class Forward(Protocol):
    """A model with its weights, bound to the pool that holds its keys and values."""

    name: str
    arithmetic: str
    "Two that differ in it may round differently: neither goes on with the keys and values of the other."
    config: ModelConfig
    final_norm: tuple[Floats, Floats | None]
    "[hidden_size] weights of the last norm."

    def hidden(self, flat: FlatBatch) -> Floats:
        """[tokens, hidden_size], before the last norm; valid until the next call. Stores the keys and values of these tokens
        in the pool on the way."""
        ...

    def logits(self, hidden: Floats) -> Floats:
        """Rows of what hidden() gave, [rows, hidden_size] -> [rows, vocab_size], which the caller may change; valid until the
        next call."""
        ...

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        """The token ids that logits() would give the largest number, of those that `masks` allow, the first of equal ones:
        [rows]. NOT_FINITE_ID for a row whose logits are not all finite, allowed or not; NOTHING_LEFT_ID where none is."""
        ...

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        """A token for each row, as `draws` say, of those that `masks` allow, or NOT_FINITE_ID or NOTHING_LEFT_ID:
        draws.choose(). May change the logits."""
        ...

    def report_progress(self, word: ProgressWord) -> None:
        """Advance the word from now on, at least once per layer."""
        ...

    def close(self) -> None:
        """Let go of the pool: nothing can be computed any more."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedForward:
    """A model whose weights are loaded. The pool comes after them: only then is it known what memory is left for it."""

    kv: KVKind
    "What it wants the pool to hold."
    with_pool: Callable[[Pool], Forward]


def torch_kv_kind(settings: WorkerConfig) -> KVKind:
    """Here and not with the torch forward: that it cannot be is said without importing torch."""
    if settings.kv_dtype == "bfloat16" or settings.kv_dtype == "fp8":
        raise InvalidConfig(f"kv_dtype {settings.kv_dtype} needs a GPU: take float16")
    if settings.kv_dtype == "int8":
        raise InvalidConfig(f"kv_dtype {settings.kv_dtype} needs the native kernels: take float16")
    return KVKind("float32" if settings.kv_dtype == "auto" else settings.kv_dtype)
