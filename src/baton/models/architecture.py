"""Differences between architectures: names in files, names of parameters, and traits. All share one decoder (models/decoder.py,
native/, worker/cuda/)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from baton.models.config import Activation, Experts, RopeConfig, Traits
from baton.models.config_fields import ConfigFields
from baton.models.rope_from_hf import rope_from_hf

RotaryPairs = Literal["halves", "neighbours"]
"""Dimensions of a head that rotate together in a file: i and i + half of them, or 2 i and 2 i + 1."""

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
)
"""Activations by their name in a config.json."""


class Architecture(ABC):
    """A family of models: one subclass each, never instantiated."""

    name: ClassVar[str]
    "Our name of the architecture (ModelConfig.architecture)."
    hf_names: ClassVar[tuple[str, ...]]
    "Class names in `architectures` of a Hugging Face config.json."
    gguf_names: ClassVar[tuple[str, ...]]
    "Names in `general.architecture` of a GGUF file."
    hf_pairs: ClassVar[RotaryPairs] = "halves"
    gguf_pairs: ClassVar[RotaryPairs] = "halves"
    activation: ClassVar[Activation] = "silu"
    "The family's only activation."
    hf_activations: ClassVar[Mapping[str, Activation]] = MappingProxyType({})
    "Activations of its config.json files that do not mean what ACTIVATIONS says."
    norm_plus_one: ClassVar[bool] = False
    "Whether norms of a Hugging Face folder multiply with 1 + weight. (GGUF files have the 1 in them.)"
    hf_stacked_experts: ClassVar[bool] = False
    """Whether a Hugging Face folder stores all experts of a layer in one tensor, in floats or MXFP4
    (loaders/stacked_experts.py)."""
    gguf_yarn_truncates: ClassVar[bool] = True
    "Value of YarnScaling.truncate, which GGUF files lack."
    hf_layer_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    "Our names of layer parameters whose names differ from those in loaders/safetensors.py."
    gguf_layer_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    "Our names of layer parameters whose names differ from those in loaders/gguf.py."
    hf_extra_heads: ClassVar[tuple[str, ...]] = ()
    "Prefixes of tensors of heads that predict further tokens: not run. (Others store such heads as layers behind the last.)"
    hf_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    "Defaults of settings that this family's config.json may omit."

    @classmethod
    @abstractmethod
    def traits_from_hf(cls, fields: ConfigFields) -> Traits:
        """Traits from config.json. Raises ModelUnsupported."""

    @classmethod
    def rope_from_hf(cls, fields: ConfigFields) -> RopeConfig:
        return rope_from_hf(fields)

    @classmethod
    def norm_eps_from_hf(cls, fields: ConfigFields) -> float:
        return fields.number("rms_norm_eps")

    @classmethod
    def mlp_size_from_hf(cls, fields: ConfigFields) -> int:
        return fields.integer("intermediate_size")

    @classmethod
    def experts_from_hf(cls, fields: ConfigFields) -> Experts | None:
        """Experts from config.json. None: the architecture has none."""
        return None

    @classmethod
    @abstractmethod
    def traits_from_gguf(cls, fields: ConfigFields, tensors: Collection[str]) -> Traits:
        """Traits from metadata (keys without the architecture's prefix) and the names of the tensors."""

    @classmethod
    def layer_ropes_from_gguf(cls, fields: ConfigFields, rope: RopeConfig) -> tuple[RopeConfig, ...]:
        """Rotary settings by layer, for Traits.layer_ropes. `rope`: the file's own settings, with their scaling."""
        return ()

    @classmethod
    def layers_from_gguf(cls, fields: ConfigFields) -> int:
        return fields.layer_count("block_count")

    @classmethod
    def norm_eps_from_gguf(cls, fields: ConfigFields) -> float:
        return fields.number("attention.layer_norm_rms_epsilon")

    @classmethod
    def experts_from_gguf(cls, fields: ConfigFields) -> Experts | None:
        return None


def windows_by_kind(fields: ConfigFields, window: int | None) -> tuple[int | None, ...]:
    """Windows by layer, from `layer_types`. Empty: full attention everywhere."""
    kinds = layer_kinds(fields)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds) if window else ()


def layer_kinds(fields: ConfigFields) -> list[str]:
    """Kind of attention by layer, sliding or full, from `layer_types`."""
    return fields.texts("layer_types", ("sliding_attention", "full_attention"), fields.layer_count("num_hidden_layers"))


def with_layer_kinds(fields: ConfigFields, full_every: int) -> ConfigFields:
    """Adds `layer_types` to older files: every `full_every`th layer has full attention."""
    if fields.get("layer_types"):
        return fields
    layers = range(fields.layer_count("num_hidden_layers"))
    kinds = ["sliding_attention" if (layer + 1) % full_every else "full_attention" for layer in layers]
    return ConfigFields({**fields.values, "layer_types": kinds}, fields.origin)
