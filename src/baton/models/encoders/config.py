"""The shape of an encoder: a bidirectional transformer of BERT's or ModernBERT's kind, with or without classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.errors import ModelFileBroken

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassHead:
    """The classes of an encoder: a dense layer, an activation and a norm (ModernBERT) turn the pooled state into one logit per
    class."""

    labels: tuple[str, ...]
    "Names of the classes, of which a reranker has one."
    activation: EncoderActivation
    pooling: Literal["cls", "mean"] = "cls"
    dense_bias: bool = True
    norm: bool = False
    sigmoid: bool = True
    """Whether the score of a reranker is the sigmoid of its logit; else it is the logit itself (sentence-transformers'
    Identity)."""
    multi_label: bool = False
    "Whether classes are independent: probabilities are sigmoids. Else they are a softmax."

    def __post_init__(self) -> None:
        _require(len(self.labels) >= 1, "a classification head without classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    architecture: str
    "Name of the family: a key of families.FAMILIES."
    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    norm_eps: float
    activation: EncoderActivation
    modern: bool = False
    """Whether the family is ModernBERT: norms before attention and MLP, rotary positions, gated MLP. Else BERT's: norms after
    them, learned positions."""
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    positions: int = 0
    "Rows of the table of positions. 0: positions are rotary."
    position_offset: int = 0
    "Row of the first token in that table."
    types: int = 0
    "Rows of the table of token types. 0: the family has none."
    windows: tuple[int | None, ...] = ()
    "Number of tokens to either side that a token attends to, by layer. None: all. Empty: all, in every layer."
    thetas: tuple[float, ...] = ()
    "Rotary base of each layer."
    pair_separator: int | None = None
    "Id of the separator: tokens after the first one have type 1. None: every token has type 0."
    head: ClassHead | None = None
    "The classes. None: the model computes vectors."
    normalised: bool = True
    "Whether vectors are scaled to length 1. False: sentence-transformers' modules.json has no Normalize."
    context_tokens_max: int
    "Length of the longest input and one token more: the engine counts an answer of one token."

    def __post_init__(self) -> None:
        for field in ("vocab_size", "layers", "hidden_size", "heads", "intermediate_size"):
            _require(getattr(self, field) >= 1, f"{field} is {getattr(self, field)}: it must be at least 1")
        _require(self.hidden_size % self.heads == 0, f"{self.hidden_size} dimensions cannot be shared among {self.heads} heads")
        _require(
            math.isfinite(self.norm_eps) and self.norm_eps >= 0, f"norm_eps is {self.norm_eps}: it must be a number from 0 up"
        )
        _require(self.context_tokens_max >= 2, f"no input fits {self.positions} positions from {self.position_offset} on")
        _require(self.modern or self.positions >= self.position_offset + self.context_tokens_max - 1, "too few positions")
        _require(not self.modern or self.head_dim % 2 == 0, f"heads of {self.head_dim}: rotary positions turn pairs")
        _require(all(window is None or window >= 0 for window in self.windows), "a window of attention is negative")
        _require(all(theta > 1 and math.isfinite(theta) for theta in self.thetas), "every rotary base must be above 1")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def tied_embeddings(self) -> bool:
        """Whether head and embedding are tied: an encoder has no output head."""
        return False


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ModelFileBroken(f"the encoder's config: {message}")
