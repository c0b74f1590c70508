"""The shape of a model: everything forward() needs to know that is not a tensor.

One frozen value, built by config_from_hf.py or config_from_gguf.py (or by hand, for dummy weights), and checked then. It holds
no file names and no torch types, so any process can use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from baton.errors import ModelUnsupported
from baton.models.shard import WHOLE, Shard


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ModelUnsupported(f"model config: {message}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Divides every position by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Divides slow frequencies by `factor`, keeps fast ones, blends those between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Llama3Scaling with a ramp over dimensions, plus a factor on the attention scores."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    "Factor on cos and sin, so scores grow by its square. The readers compute it if a file omits it."
    truncate: bool = True
    "Whether the ends of the ramp are rounded to whole dimensions."


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyDivisors:
    """One divisor per frequency: how a GGUF file stores any of the schemes above."""

    divisors: tuple[float, ...]
    attention_factor: float = 1.0
    "Factor on cos and sin, as in YarnScaling."


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Loaders arrange every head so that dimensions i and i + head_dim/2 rotate together
    (loaders/arranged.py), whatever the file's pairs."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dimensions: int | None = None
    "Number of dimensions of a head that rotate; the others keep their values at every position. None: all."

    def __post_init__(self) -> None:
        scaling = self.scaling
        _require(math.isfinite(self.theta) and self.theta > 1, f"rope theta is {self.theta}: it must be above 1")
        even = self.dimensions is None or (self.dimensions >= 0 and self.dimensions % 2 == 0)
        _require(even, f"{self.dimensions} rotary dimensions: they turn in pairs")
        if isinstance(scaling, LinearScaling | Llama3Scaling | YarnScaling):
            ok = math.isfinite(scaling.factor) and scaling.factor > 0
            _require(ok, f"the rotary scaling factor is {scaling.factor}: it must be positive")
        if isinstance(scaling, Llama3Scaling):
            ok = scaling.high_freq_factor > scaling.low_freq_factor
            _require(ok, "rotary scaling llama3: high_freq_factor must be above low_freq_factor")
        if isinstance(scaling, YarnScaling):
            numbers = (scaling.original_context, scaling.beta_fast, scaling.beta_slow, scaling.attention_factor)
            ok = all(math.isfinite(number) and number > 0 for number in numbers)
            _require(ok, "rotary scaling yarn: the original context, both betas and the attention factor are positive")
        if isinstance(scaling, FrequencyDivisors):
            ok = all(d > 0 for d in (*scaling.divisors, scaling.attention_factor))
            _require(ok, "every rotary divisor and the attention factor must be positive")


NO_ROPE = RopeConfig(dimensions=0)
"""RopeConfig of a layer without positions."""

Activation = Literal["silu", "gelu_tanh", "swiglu_oai"]
OAI_LIMIT, OAI_SLOPE = 7.0, 1.702
"""Clamp of gate and up, and slope of the sigmoid, of swiglu_oai."""
NormPlaces = Literal["before", "after", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Differences between architectures. Each family's file sets them; every backend (torch, C, CUDA) reads them, and refuses
    by name those that it does not implement (worker/platforms/lacks.py)."""

    qkv_bias: bool = False
    output_bias: bool = False
    "Whether the attention's output projection has a bias."
    mlp_bias: bool = False
    qk_norm: bool = False
    "Whether queries and keys are normalised before the rotation: each head separately, with one weight for all heads."
    qk_norm_across_heads: bool = False
    "Whether qk_norm treats all heads of a token as one row, with a weight per dimension of every head."
    layer_windows: tuple[int | None, ...] = ()
    "Sliding window of each layer in tokens, None for full attention. Empty: full attention everywhere."
    layer_ropes: tuple[RopeConfig, ...] = ()
    "Rotary positions by layer. Empty: ModelConfig.rope everywhere."
    sinks: bool = False
    "Whether each head has a learned score that takes part in the softmax and has no value."
    activation: Activation = "silu"
    "Activation of the gate, in MLPs and experts."
    norms: NormPlaces = "before"
    "Place of the norms: before attention and MLP, after them (on what is added to the residual), or both."
    layer_norm: bool = False
    "Whether norms of the residual are LayerNorm (subtract the mean); else RMSNorm."
    norm_bias: bool = False
    "Whether norms of the residual have a bias."
    parallel: bool = False
    "Whether attention and MLP read the same normalised input, and both are added to the residual. There is no MLP norm then."
    embedding_scale: float = 1.0
    "Factor of embeddings before the first layer."
    attention_scale: float | None = None
    "Factor of scores before the softmax. None: 1 / sqrt(head_dim)."
    logits_scale: float = 1.0
    "Factor of logits, which loaders fold into the last norm's weight."


HEAD_UNIT = 32
"""Bits of a word in a mask of tokens."""
Scoring = Literal["softmax", "sigmoid"]
EXPERTS_MAX, EXPERTS_OF_ALL_LAYERS_MAX = 4096, 131_072
"""Limits of experts: names are built for every expert of every layer before any tensor could contradict the numbers. The
largest models have some 25,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of a layer's MLP: a router picks a few of many small MLPs per token."""

    count: int
    per_token: int
    "Experts per token."
    inner_size: int
    "Width of one expert; ModelConfig.intermediate_size is the width of an MLP without experts."
    normalised: bool
    "Whether the shares of the picked experts are scaled to sum 1."
    layers: tuple[bool, ...] = ()
    "Layers that have experts; the others have an MLP. Empty: all layers."
    scoring: Scoring = "softmax"
    "Conversion of the router's logits to shares."
    bias: bool = False
    "Whether router and experts' matrices have biases."
    correction: bool = False
    "Whether a bias per expert is added to the shares for the choice, but not to the shares themselves."
    scale: float = 1.0
    "Final factor of the shares."
    shared_size: int = 0
    "Width of an MLP that every token passes besides the picked experts. 0: none."
    shared_gate: bool = False
    "Whether the output of that MLP is multiplied by the sigmoid of another product."

    def __post_init__(self) -> None:
        ok = 1 <= self.per_token <= self.count and self.inner_size >= 1
        _require(ok, f"{self.per_token} of {self.count} experts of width {self.inner_size} cannot be picked")
        _require(self.count <= EXPERTS_MAX, f"{self.count} experts; more than {EXPERTS_MAX} are no model")
        _require(self.shared_size >= 0, f"a shared expert of width {self.shared_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: norms, rotary positions, grouped-query attention, a gated MLP or experts."""

    architecture: str
    "Our name of the architecture: a key of registry.ARCHITECTURES."
    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    "Key and value heads; each is shared by heads / kv_heads query heads."
    head_dim: int
    "Width of one head. Need not be hidden_size / heads."
    intermediate_size: int
    rope: RopeConfig
    norm_eps: float
    tied_embeddings: bool
    "Whether the output head is the embedding table."
    traits: Traits = Traits()
    experts: Experts | None = None
    "The mixture of experts. None: one MLP for all tokens."
    context_tokens_max: int
    "Maximum of positions, prompt and output together."
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    "Stop tokens."
    shard: Shard = field(default=WHOLE, repr=False)
    """The rank whose part this is: heads, kv_heads and widths of MLPs are those of the rank (loaders/sharded.py). Not in the
    repr, which is part of the identity: there the number of ranks is a field of its own."""

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size"),
            "context_tokens_max",
        ):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: it must be at least 1")
        _require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} query heads cannot be shared evenly among {self.kv_heads} key/value heads",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: rotary positions turn pairs, so it must be even")
        scales = (self.traits.embedding_scale, self.attention_scale, self.traits.logits_scale)
        _require(all(0 < scale < math.inf for scale in scales), f"the scales {scales} must be positive numbers")
        ok = math.isfinite(self.norm_eps) and self.norm_eps >= 0
        _require(ok, f"norm_eps is {self.norm_eps}: it must be a number from 0 up")
        windows = self.traits.layer_windows
        _require(len(windows) in (0, self.layers), f"{len(windows)} layer windows were given for {self.layers} layers")
        _require(all(w is None or w >= 1 for w in windows), "a sliding window must hold at least one token")
        for rope in (self.rope, *self.traits.layer_ropes):
            self._check_rope(rope)
        ropes = len(self.traits.layer_ropes)
        _require(ropes in (0, self.layers), f"{ropes} rotary settings were given for {self.layers} layers")
        experts = self.layers * (self.experts.count if self.experts else 0)
        _require(experts <= EXPERTS_OF_ALL_LAYERS_MAX, f"{experts} experts in all layers; no model has that many")
        mixed = len(self.experts.layers) if self.experts else 0
        _require(mixed in (0, self.layers), f"experts were given for {mixed} of {self.layers} layers")

    def _check_rope(self, rope: RopeConfig) -> None:
        rotated = self.rotary_dimensions(rope)
        _require(rotated <= self.head_dim, f"rotary positions on {rotated} dimensions of heads that have {self.head_dim}")
        if isinstance(rope.scaling, FrequencyDivisors):
            count = len(rope.scaling.divisors)
            _require(count == rotated // 2, f"{count} rotary divisors were given for {rotated // 2} frequencies")

    def rotary_dimensions(self, rope: RopeConfig) -> int:
        return self.head_dim if rope.dimensions is None else rope.dimensions

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values per token in the keys of one layer, and as many in its values."""
        return self.kv_heads * self.head_dim

    @property
    def head_rows(self) -> range:
        """Tokens whose logits this rank computes. Whole words of bit masks of tokens."""
        return self.shard.share(self.vocab_size, HEAD_UNIT)

    @property
    def all_head_rows(self) -> list[range]:
        """Tokens whose logits all ranks compute together."""
        ranks = self.shard.ranks
        return [Shard(rank, ranks).share(self.vocab_size, HEAD_UNIT) for rank in range(ranks)]

    @property
    def own_experts(self) -> range:
        """Experts of a layer that this rank computes."""
        return self.shard.share(self.experts.count if self.experts else 0)

    @property
    def attention_scale(self) -> float:
        """Factor of scores before the softmax."""
        given = self.traits.attention_scale
        return float(self.head_dim**-0.5) if given is None else given

    def window(self, layer: int) -> int | None:
        """Number of tokens, itself included, that a token of this layer attends to. None: all."""
        return self.traits.layer_windows[layer] if self.traits.layer_windows else None

    def layer_rope(self, layer: int) -> RopeConfig:
        return self.traits.layer_ropes[layer] if self.traits.layer_ropes else self.rope

    def layer_experts(self, layer: int) -> Experts | None:
        """The experts of the layer. None: it has an MLP."""
        experts = self.experts
        return experts if experts is not None and (not experts.layers or experts.layers[layer]) else None
