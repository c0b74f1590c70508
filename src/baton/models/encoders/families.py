"""The families of encoders: their classes in config.json, their settings, and the names of their tensors.

Unsupported settings that change the result are refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import ModelUnsupported
from baton.models.config_fields import ConfigFields
from baton.models.encoders.config import ClassHead, EncoderActivation, EncoderConfig

ACTIVATIONS: Final[Mapping[str, EncoderActivation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_BERT_TOP: Final = {
    "embeddings.word_embeddings": "embed",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "embed_norm",
}
_BERT_LAYER: Final = {
    "attention.self.query": "attention.q",
    "attention.self.key": "attention.k",
    "attention.self.value": "attention.v",
    "attention.output.dense": "attention.o",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
_DISTILBERT_LAYER: Final = {
    "attention.q_lin": "attention.q",
    "attention.k_lin": "attention.k",
    "attention.v_lin": "attention.v",
    "attention.out_lin": "attention.o",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "mlp.up",
    "ffn.lin2": "mlp.down",
    "output_layer_norm": "mlp_norm",
}
_MODERN_LAYER: Final = {
    "attn.Wqkv": "attention.qkv",
    "attn.Wo": "attention.o",
    "attn_norm": "attention_norm",
    "mlp.Wi": "mlp.gate_up",
    "mlp.Wo": "mlp.down",
    "mlp_norm": "mlp_norm",
}
OLD_NORM_NAMES: Final = {"gamma": "weight", "beta": "bias"}
"""Names of norms in checkpoints that were converted from TensorFlow, and today's names."""


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    name: str
    classes: tuple[str, ...]
    "Prefixes of class names in config.json, before Model, ForMaskedLM or ForSequenceClassification."
    prefix: str
    "Prefix of tensor names in models with a head."
    layer: str
    top_names: Mapping[str, str]
    layer_names: Mapping[str, str]
    head_names: Mapping[str, str]
    """Names of the head's tensors with ForSequenceClassification. Other classes may store the same tensors, which are then left
    out."""
    unused: tuple[str, ...]
    "Prefixes of the names of tensors that no vector depends on."

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(f"{name}{kind}" for name in self.classes for kind in (*VECTOR_KINDS, CLASS_KIND))

    def our_name(self, theirs: str, *, classifies: bool) -> str:
        """Our name of a tensor. Empty: the model does without it. An unknown name is returned unchanged."""
        name = theirs.removeprefix(self.prefix)
        module, _, kind = name.rpartition(".")
        kind = OLD_NORM_NAMES.get(kind, kind)
        if classifies and module in self.head_names:
            return f"{self.head_names[module]}.{kind}"
        if name.startswith(self.unused) or (module in self.head_names and not classifies):
            return ""
        if module in self.top_names:
            return f"{self.top_names[module]}.{kind}"
        match = re.fullmatch(rf"{re.escape(self.layer)}\.(\d+)\.(.+)", module)
        if match is None or match[2] not in self.layer_names:
            return theirs
        return f"layers.{match[1]}.{self.layer_names[match[2]]}.{kind}"


VECTOR_KINDS: Final = ("Model", "ForMaskedLM")
"""Endings of class names that compute vectors: sentence-transformers serves a masked language model without its head."""
CLASS_KIND: Final = "ForSequenceClassification"
_BUFFERS: Final = ("embeddings.position_ids", "embeddings.token_type_ids")
BERT: Final = EncoderFamily(
    *("bert", ("Bert",), "bert.", "encoder.layer", _BERT_TOP, _BERT_LAYER),
    {"pooler.dense": "head.dense", "classifier": "head.out"},
    (*_BUFFERS, "cls."),
)
ROBERTA: Final = EncoderFamily(
    *("roberta", ("Roberta", "XLMRoberta"), "roberta.", "encoder.layer", _BERT_TOP, _BERT_LAYER),
    {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"},
    (*_BUFFERS, "lm_head.", "pooler."),
)
DISTILBERT: Final = EncoderFamily(
    *("distilbert", ("DistilBert",), "distilbert.", "transformer.layer", _BERT_TOP, _DISTILBERT_LAYER),
    {"pre_classifier": "head.dense", "classifier": "head.out"},
    (*_BUFFERS, "vocab_"),
)
MODERNBERT: Final = EncoderFamily(
    *("modernbert", ("ModernBert",), "model.", "layers"),
    {"embeddings.tok_embeddings": "embed", "embeddings.norm": "embed_norm", "final_norm": "final_norm"},
    _MODERN_LAYER,
    {"head.dense": "head.dense", "head.norm": "head.norm", "classifier": "head.out"},
    ("decoder.",),
)
FAMILIES: Final = {family.name: family for family in (BERT, ROBERTA, DISTILBERT, MODERNBERT)}
_BY_CLASS: Final = {name: family for family in FAMILIES.values() for name in family.hf_names}


def encoder_family(raw: Mapping[str, Any]) -> EncoderFamily | None:
    """The family of a config.json. None: it is not an encoder."""
    names = raw.get("architectures") or ()
    known = [name for name in names if isinstance(name, str) and name in _BY_CLASS] if isinstance(names, list) else []
    return _BY_CLASS[known[0]] if known else None


def classifies(raw: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(CLASS_KIND) for name in raw.get("architectures") or ())


def encoder_config_from_hf(raw: Mapping[str, Any], origin: str) -> EncoderConfig:
    """The config from config.json alone."""
    family, fields = encoder_family(raw), ConfigFields(raw, origin)
    assert family is not None
    if raw.get("quantization_config"):
        raise ModelUnsupported(f"{origin}: the weights are quantised; encoders run in float32, float16 and bfloat16")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.boolean(key, False):
            raise ModelUnsupported(f"{origin}: {key} is not supported: the model is no plain encoder")
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ModelUnsupported(f"{origin}: position_embedding_type {kind} is not supported; supported is absolute")
    if family is MODERNBERT:
        return _modernbert(fields)
    return _distilbert(fields) if family is DISTILBERT else _bert(fields, family)


def _bert(fields: ConfigFields, family: EncoderFamily) -> EncoderConfig:
    positions = fields.integer("max_position_embeddings")
    offset = fields.integer("pad_token_id", 1) + 1 if family is ROBERTA else 0
    return EncoderConfig(
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        layers=fields.layer_count("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        heads=fields.integer("num_attention_heads"),
        intermediate_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=_activation(fields, "hidden_act"),
        positions=positions,
        position_offset=offset,
        types=fields.integer("type_vocab_size", 2),
        head=_head(fields, "tanh"),
        context_tokens_max=positions - offset + 1,
    )


def _distilbert(fields: ConfigFields) -> EncoderConfig:
    return EncoderConfig(
        architecture=DISTILBERT.name,
        vocab_size=fields.integer("vocab_size"),
        layers=fields.layer_count("n_layers"),
        hidden_size=fields.integer("dim"),
        heads=fields.integer("n_heads"),
        intermediate_size=fields.integer("hidden_dim"),
        norm_eps=1e-12,
        activation=_activation(fields, "activation"),
        positions=fields.integer("max_position_embeddings"),
        head=_head(fields, "relu"),
        context_tokens_max=fields.integer("max_position_embeddings") + 1,
    )


def _modernbert(fields: ConfigFields) -> EncoderConfig:
    layers, window = fields.layer_count("num_hidden_layers"), fields.integer("local_attention", 128) // 2
    every = fields.integer("global_attn_every_n_layers", 3)
    if fields.get("layer_types") is not None:
        kinds = fields.texts("layer_types", ("sliding_attention", "full_attention"), layers)
    else:
        kinds = ["sliding_attention" if layer % max(every, 1) else "full_attention" for layer in range(layers)]
    thetas = {
        "full_attention": _theta(fields, "full_attention", "global_rope_theta", 160_000.0),
        "sliding_attention": _theta(fields, "sliding_attention", "local_rope_theta", 10_000.0),
    }
    head = _head(
        fields,
        _activation(fields, "classifier_activation"),
        pooling=fields.get("classifier_pooling", "cls"),
        dense_bias=fields.boolean("classifier_bias", False),
        norm=True,
    )
    return EncoderConfig(
        architecture=MODERNBERT.name,
        vocab_size=fields.integer("vocab_size"),
        layers=layers,
        hidden_size=fields.integer("hidden_size"),
        heads=fields.integer("num_attention_heads"),
        intermediate_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("norm_eps", 1e-5),
        activation=_activation(fields, "hidden_activation"),
        modern=True,
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        norm_bias=fields.boolean("norm_bias", False),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        thetas=tuple(thetas[kind] for kind in kinds),
        head=head,
        context_tokens_max=fields.integer("max_position_embeddings", 8192) + 1,
    )


def _theta(fields: ConfigFields, kind: str, older: str, default: float) -> float:
    """The rotary base of a kind of layers. `rope_parameters` has a table per kind since transformers 5."""
    table = fields.get("rope_parameters")
    of_kind = table.get(kind) if isinstance(table, dict) else None
    settings = ConfigFields(of_kind if isinstance(of_kind, dict) else {}, fields.origin)
    scaling = fields.get("rope_scaling")
    rope_type = settings.get("rope_type", "default") if not scaling else f"scaling {scaling}"
    if rope_type != "default":
        raise ModelUnsupported(f"{fields.origin}: rotary positions of type {rope_type} are not supported for encoders")
    return settings.positive("rope_theta", fields.positive(older, default))


def _activation(fields: ConfigFields, key: str) -> EncoderActivation:
    name = str(fields.get(key) or "gelu")
    if name not in ACTIVATIONS:
        raise ModelUnsupported(f"{fields.origin}: {key} {name} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _head(fields: ConfigFields, activation: EncoderActivation, **settings: Any) -> ClassHead | None:
    if not classifies(fields.values):
        return None
    if settings.get("pooling", "cls") not in ("cls", "mean"):
        raise ModelUnsupported(f"{fields.origin}: classifier_pooling {settings['pooling']!r} is not supported")
    labels = _labels(fields)
    multi = fields.get("problem_type") == "multi_label_classification"
    return ClassHead(labels=labels, activation=activation, sigmoid=_sigmoid(fields), multi_label=multi, **settings)


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    """Names of the classes. transformers' default is two classes."""
    named = fields.get("id2label")
    if isinstance(named, dict) and all(str(key).isdecimal() for key in named) and named:
        return tuple(str(named[key]) for key in sorted(named, key=lambda key: int(key)))
    return tuple(f"LABEL_{number}" for number in range(min(fields.integer("num_labels", 2), 1 << 16)))


def _sigmoid(fields: ConfigFields) -> bool:
    """Whether a score is the sigmoid of a logit, as sentence-transformers' cross-encoders state it."""
    newer = fields.get("sentence_transformers")
    named = (newer.get("activation_fn") if isinstance(newer, dict) else None) or fields.get(
        "sbert_ce_default_activation_function"
    )
    kind = str(named or "torch.nn.modules.activation.Sigmoid").rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelUnsupported(f"{fields.origin}: scores by {named} are not supported; supported are Sigmoid and Identity")
    return kind == "Sigmoid"
