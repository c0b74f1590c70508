"""The shape of a model: everything forward() needs to know that is not a tensor.

One frozen value, made by config_from_hf.py or config_from_gguf.py (or by hand, for dummy weights), checked when it is
made. It holds no file names and no torch types, so any process may carry it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.errors import ModelUnsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones are kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Like Llama3Scaling with a ramp over dimensions, plus a factor on the attention scores."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    "Multiplies cos and sin, so scores grow by its square. The readers work it out where a file leaves it open."
    truncate: bool = True
    "Round the ends of the ramp to whole dimensions."


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyDivisors:
    """One divisor a frequency: how a GGUF file stores any of the schemes above, already worked out."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        scaling = self.scaling
        _require(math.isfinite(self.theta) and self.theta > 1, f"rope theta is {self.theta}: it must be above 1")
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
            _require(all(d > 0 for d in scaling.divisors), "every rotary divisor must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """In what one architecture differs from the next. Each architecture's file says which it has."""

    qkv_bias: bool = False
    output_bias: bool = False
    "Bias on the attention's output projection."
    mlp_bias: bool = False
    qk_norm: bool = False
    "RMS norm of every query and key head before the rotation."
    layer_windows: tuple[int | None, ...] = ()
    "Sliding window of each layer in tokens, None for full attention. Empty: full attention everywhere."


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of every layer's MLP: a router picks a few of many small ones for each token."""

    count: int
    per_token: int
    "How many work on a token."
    inner_size: int
    "Width of one expert; ModelConfig.intermediate_size is that of an MLP without experts, and not used."
    normalised: bool
    "The shares of the picked ones are scaled to add up to 1."

    def __post_init__(self) -> None:
        ok = 1 <= self.per_token <= self.count and self.inner_size >= 1
        _require(ok, f"{self.per_token} of {self.count} experts of width {self.inner_size} cannot be picked")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

    architecture: str
    "Our name of the architecture: a key of registry.ARCHITECTURES."
    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    "Key and value heads; each serves heads / kv_heads query heads."
    head_dim: int
    "Width of one head. Need not be hidden_size / heads."
    intermediate_size: int
    rope: RopeConfig
    norm_eps: float
    tied_embeddings: bool
    "The output head is the embedding table."
    traits: Traits = Traits()
    experts: Experts | None = None
    "None: one MLP for all tokens."
    context_tokens_max: int
    "Positions the model was made for, prompt and output together."
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    "Tokens that end an answer."

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size"),
            "context_tokens_max",
        ):
            _require(getattr(self, field) >= 1, f"{field} is {getattr(self, field)}: it must be at least 1")
        _require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} query heads cannot be shared evenly among {self.kv_heads} key/value heads",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: rotary positions turn pairs, so it must be even")
        ok = math.isfinite(self.norm_eps) and self.norm_eps >= 0
        _require(ok, f"norm_eps is {self.norm_eps}: it must be a number from 0 up")
        windows = self.traits.layer_windows
        _require(len(windows) in (0, self.layers), f"{len(windows)} layer windows were given for {self.layers} layers")
        _require(all(w is None or w >= 1 for w in windows), "a sliding window must hold at least one token")
        if isinstance(self.rope.scaling, FrequencyDivisors):
            count = len(self.rope.scaling.divisors)
            _require(count == self.head_dim // 2, f"{count} rotary divisors were given for {self.head_dim // 2} frequencies")

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values that one token adds to the keys of one layer, and again to its values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token of this layer may look back on. None: all of them."""
        return self.traits.layer_windows[layer] if self.traits.layer_windows else None


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ModelUnsupported(f"model config: {message}")
