"""The interface of a model's forward pass, in numpy: callers do not depend on torch."""

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
    """Name of the arithmetic. Forward passes with different names may round differently: neither can use the other's keys and
    values."""
    config: ModelConfig
    final_norm: tuple[Floats, Floats | None]
    "[hidden_size] weights of the last norm."

    def hidden(self, flat: FlatBatch) -> Floats:
        """The hidden states of a step, [tokens, hidden_size], before the last norm; valid until the next call. Stores the keys
        and values of these tokens in the pool."""
        ...

    def logits(self, hidden: Floats) -> Floats:
        """Rows of hidden()'s result, [rows, hidden_size] -> [rows, vocab_size], which the caller may change; valid until the
        next call."""
        ...

    def likeliest(self, hidden: Floats, masks: Masks | None = None) -> Int64s:
        """[rows] the token with the largest logit among those that `masks` allow, the first of equal ones. NOT_FINITE_ID for a
        row whose logits are not all finite, allowed or not; NOTHING_LEFT_ID if none is allowed."""
        ...

    def choose(self, logits: Floats, draws: Draws, masks: Masks | None = None) -> Int64s:
        """A token per row, by `draws`, of those that `masks` allow, or NOT_FINITE_ID or NOTHING_LEFT_ID: draws.choose(). May
        change the logits."""
        ...

    def report_progress(self, word: ProgressWord) -> None:
        """Sets the word to advance from now on, at least once per layer."""
        ...

    def close(self) -> None:
        """Releases the pool: nothing can be computed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedForward:
    """A model with loaded weights. The pool comes later, because its memory is known only then."""

    kv: KVKind
    "The KV type of the pool."
    with_pool: Callable[[Pool], Forward]


def torch_kv_kind(settings: WorkerConfig) -> KVKind:
    """The KV type of the torch backend. Defined here, not in torch_forward.py: unsupported settings raise without importing
    torch."""
    if settings.kv_dtype == "bfloat16" or settings.kv_dtype == "fp8":
        raise InvalidConfig(f"kv_dtype {settings.kv_dtype} needs a GPU: take float16")
    if settings.kv_dtype == "int8":
        raise InvalidConfig(f"kv_dtype {settings.kv_dtype} needs the native kernels: take float16")
    return KVKind("float32" if settings.kv_dtype == "auto" else settings.kv_dtype)
