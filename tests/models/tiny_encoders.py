"""Tiny random encoders with awkward shapes, as transformers builds them, and tokenizers of the kinds they come with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
import torch  # noqa: E402

ODD: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
DISTIL = {
    "vocab_size": 97,
    "dim": 36,
    "hidden_dim": 56,
    "n_layers": 3,
    "n_heads": 3,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}
MODERN = {**ODD, "local_attention": 8, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
ONE = {"num_labels": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {**ODD, "layer_norm_eps": 1e-5}),
    "bert-relu": ("BertModel", {**ODD, "hidden_act": "relu", "type_vocab_size": 3}),
    "bert-gelu-new": ("BertModel", {**ODD, "hidden_act": "gelu_new"}),
    "bert-masked": ("BertForMaskedLM", ODD),
    "bert-classes": ("BertForSequenceClassification", {**ODD, "num_labels": 3}),
    "bert-reranker": ("BertForSequenceClassification", {**ODD, **ONE}),
    "roberta": ("RobertaModel", {**ODD, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", {**ODD, "pad_token_id": 1, "type_vocab_size": 1}),
    "roberta-classes": ("RobertaForSequenceClassification", {**ODD, "pad_token_id": 1, "type_vocab_size": 1, "num_labels": 2}),
    "xlm-roberta-reranker": ("XLMRobertaForSequenceClassification", {**ODD, "pad_token_id": 1, "type_vocab_size": 1, **ONE}),
    "distilbert": ("DistilBertModel", DISTIL),
    "distilbert-reranker": ("DistilBertForSequenceClassification", {**DISTIL, **ONE}),
    "modernbert": ("ModernBertModel", {**MODERN, "num_hidden_layers": 5}),
    "modernbert-biases": ("ModernBertModel", {**MODERN, **ALL_BIASES, "num_hidden_layers": 4}),
    "modernbert-reranker": ("ModernBertForSequenceClassification", {**MODERN, **ONE}),
    "modernbert-mean": ("ModernBertForSequenceClassification", {**MODERN, **ALL_BIASES, **ONE, "classifier_pooling": "mean"}),
}


def oracle_encoder(case: str, seed: int = 0) -> Any:
    """With weights that are not flat, so that a wrong position or type moves a state."""
    name, settings = CASES[case]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, scale)
            if parameter.dim() == 1 and parameter_name.endswith("weight"):
                parameter.add_(1.0)
    return model


WORDS = ["the", "a", "baton", "runner", "passes", "stick", "to", "next", "is", "short", "##s", "##ing", "un", "##til", ".", "?"]


def word_piece(pair_types: bool = True) -> Tokenizer:
    """BERT's: lower case, words of pieces, [CLS] A [SEP] B [SEP] with type 1 for B."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    second = ":1" if pair_types else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] $B{second} [SEP]{second}", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer


def unigram() -> Tokenizer:
    """XLM-RoBERTa's: SentencePiece, <s> A </s> </s> B </s>."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"\u2581{word}" for word in WORDS if word.isalpha()]
    pieces = [*words, "\u2581", *"abcdefghijklmnopqrstuvwxyz.?"]
    scored = [(piece, -1.0 - place / 10) for place, piece in enumerate([*special, *pieces])]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_encoder(
    folder: Path, case: str, *, seed: int = 0, modules: tuple[str, ...] | None = None, pooling: str = "mean_tokens"
) -> Any:
    """A folder as it would be downloaded, with sentence-transformers' files where `modules` are named. Returns the oracle."""
    oracle = oracle_encoder(case, seed)
    oracle.save_pretrained(folder)
    roberta = "roberta" in case
    (unigram() if roberta else word_piece()).save(str(folder / "tokenizer.json"))
    names = ("<s>", "</s>", "<pad>") if roberta else ("[CLS]", "[SEP]", "[PAD]")
    settings = dict(zip(("cls_token", "sep_token", "pad_token"), names, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if modules is not None:
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        listed = [
            {"idx": at, "name": str(at), "path": paths[name], "type": f"sentence_transformers.models.{name}"}
            for at, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        flags = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken", "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 36, **flags}))
    return oracle
