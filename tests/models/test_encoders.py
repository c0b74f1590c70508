"""Every class of encoder gives the states and the logits of transformers in float32, alone and in company."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import CASES, oracle_encoder, word_piece, write_encoder

from baton.errors import EngineError, ModelFileBroken, ModelLoadError, ModelUnsupported
from baton.models.encoders.torch_encoder import Encoder, Groups
from baton.models.loaders.weights import RawWeights
from baton.models.open import OpenedEncoder, open_any, open_encoder
from baton.models.torch_weights import Weights

TOLERANCE = 1e-4
PROMPTS = [[2, *(random.Random(count).randrange(5, 97) for _ in range(count)), 3] for count in (1, 5, 5, 17, 40)]
PAIR = [2, 7, 9, 11, 3, 20, 21, 3]


def encoder_of(folder) -> Encoder:
    opened = open_encoder(folder)
    raw = RawWeights(opened.weights, opened.config)
    with torch.inference_mode():
        encoder = Encoder(opened.config, Weights(raw))
    raw.close()
    return encoder


@torch.inference_mode()
def oracle_states(oracle, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """After the last norm, [tokens, hidden_size]."""
    base = oracle.base_model
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return base(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **given)[0][0]


def states_of(encoder: Encoder, prompts: list[list[int]]) -> list[torch.Tensor]:
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    return list(torch.split(encoder.forward(ids, lengths), lengths))


@pytest.mark.parametrize("case", CASES)
def test_states_equal_those_of_transformers(case, tmp_path):
    oracle = write_encoder(tmp_path, case)
    encoder = encoder_of(tmp_path)
    together = states_of(encoder, PROMPTS)
    for prompt, in_company in zip(PROMPTS, together, strict=True):
        # With a head, a separator begins the second text: there is none inside these.
        expected = oracle_states(oracle, prompt)
        torch.testing.assert_close(in_company, expected, atol=TOLERANCE, rtol=0)
        alone = states_of(encoder, [prompt])[0]
        torch.testing.assert_close(alone, in_company, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if "ForSequence" in CASES[case][0]])
def test_logits_of_pairs_equal_those_of_transformers(case, tmp_path):
    oracle = write_encoder(tmp_path, case)
    encoder = encoder_of(tmp_path)
    types = {"token_type_ids": torch.tensor([[0] * 5 + [1] * 3])} if case.startswith("bert") else {}
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([PAIR]), attention_mask=torch.ones(1, 8, dtype=torch.long), **types).logits[0]
    states = states_of(encoder, [PAIR])[0]
    pooled = states.mean(0) if encoder.config.head.pooling == "mean" else states[0]
    torch.testing.assert_close(encoder.logits(pooled[None])[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("bert", {"layer_norm_eps": 0.1}),
        ("bert", {"hidden_act": "relu"}),
        ("roberta", {"pad_token_id": 0}),
        ("modernbert", {"local_attention": 16}),
        ("modernbert", {"rope_parameters": None, "global_rope_theta": 30.0}),
        ("modernbert", {"rope_parameters": None, "local_rope_theta": 30.0}),
        ("modernbert", {"layer_types": None, "global_attn_every_n_layers": 2}),
    ],
)
def test_every_setting_matters(case, change, tmp_path):
    """The oracle test would be blind to a setting that changes nothing at these sizes."""
    oracle = write_encoder(tmp_path, case)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    difference = (states_of(encoder_of(tmp_path), PROMPTS[-1:])[0] - oracle_states(oracle, PROMPTS[-1])).abs().max()
    assert difference > 10 * TOLERANCE


def test_older_files_of_modernbert_say_the_same(tmp_path):
    """transformers 4 wrote an integer and two numbers where transformers 5 writes lists and tables."""
    oracle = write_encoder(tmp_path, "modernbert")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw = {key: value for key, value in raw.items() if key not in ("layer_types", "rope_parameters")}
    older = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    path.write_text(json.dumps({**raw, **older}))
    found = states_of(encoder_of(tmp_path), PROMPTS[-1:])[0]
    torch.testing.assert_close(found, oracle_states(oracle, PROMPTS[-1]), atol=TOLERANCE, rtol=0)


def test_names_of_old_checkpoints(tmp_path):
    """gamma and beta, the numbers of positions as a tensor, and no pooler."""
    oracle = write_encoder(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    older = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
        if not name.startswith("pooler")
    }
    save_file({**older, "bert.embeddings.position_ids": torch.arange(64)[None]}, file)
    found = states_of(encoder_of(tmp_path), PROMPTS[-1:])[0]
    torch.testing.assert_close(found, oracle_states(oracle, PROMPTS[-1]), atol=TOLERANCE, rtol=0)


def test_groups_are_neighbours_of_equal_length():
    groups = Groups([2, 2, 5, 2], torch.device("cpu")).groups
    assert [(group.begin, group.count, group.length) for group in groups] == [(0, 2, 2), (4, 1, 5), (9, 1, 2)]


# What the files of a folder say


def test_what_a_folder_says(tmp_path):
    write_encoder(tmp_path, "bert", modules=("Transformer", "Pooling", "Normalize"), pooling="cls_token")
    opened = open_any(tmp_path)
    assert (opened.pooling, opened.scoring, opened.config.normalised, opened.config.head) == ("cls", "vectors", True, None)
    assert opened.config.context_tokens_max == 65  # 64 positions, and the engine's token
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    assert open_any(tmp_path).config.context_tokens_max == 33
    write_encoder(tmp_path, "bert", modules=("Transformer", "Pooling"))
    assert not open_any(tmp_path).config.normalised


def test_positions_of_roberta_begin_behind_the_padding(tmp_path):
    write_encoder(tmp_path, "xlm-roberta")
    assert open_any(tmp_path).config.context_tokens_max == 63  # 64 rows, of which two belong to no token


@pytest.mark.parametrize(
    ("named", "scoring"),
    [
        ({}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "logit"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "logit"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ],
)
def test_how_a_reranker_scores(named, scoring, tmp_path):
    write_encoder(tmp_path, "bert-reranker")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    assert open_any(tmp_path).scoring == scoring


def test_labels(tmp_path):
    write_encoder(tmp_path, "bert-classes")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id2label": {"1": "good", "0": "bad", "2": "neither"}}))
    opened = open_any(tmp_path)
    assert (opened.config.head.labels, opened.scoring) == (("bad", "good", "neither"), "softmax")


def test_types_of_a_pair_are_those_of_the_tokenizer(tmp_path):
    write_encoder(tmp_path, "bert-reranker")
    assert open_any(tmp_path).config.pair_separator == 3
    word_piece(pair_types=False).save(str(tmp_path / "tokenizer.json"))
    assert open_any(tmp_path).config.pair_separator is None
    description = json.loads(word_piece().to_str())
    description["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert open_any(tmp_path).config.pair_separator == 3


# Files that are broken, or lie


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 4}, "tensors are missing"),
        ({"num_hidden_layers": 2}, "have no place"),
        ({"hidden_size": 72}, "the config asks for"),
        ({"num_attention_heads": 5}, "cannot be shared"),
        ({"num_attention_heads": 0}, "at least 1"),
        ({"vocab_size": "many"}, "whole number"),
        ({"max_position_embeddings": 0}, "no input fits"),
        ({"layer_norm_eps": float("inf")}, "norm_eps"),
        ({"hidden_act": "mish"}, "mish"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertModel"),
    ],
)
def test_a_config_that_lies_is_refused_with_words(change, words, tmp_path):
    write_encoder(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ModelFileBroken, ModelUnsupported), match=words):
        encoder_of_any(tmp_path)


def encoder_of_any(folder):
    opened = open_any(folder)
    return RawWeights(opened.weights, opened.config)


WEIRD = [None, -1, 0, 1, 2.5, 10**30, True, "", "many", [], [3], {}, {"a": 1}, float("nan")]


@pytest.mark.parametrize(
    "case",
    [
        "bert-reranker",
        "modernbert-mean",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("xlm-roberta", "distilbert")),
    ],
)
def test_any_nonsense_in_a_config_is_refused_or_harmless(case, tmp_path):
    """Whatever one setting says, the result is a model or an error of ours: never a stray exception, never a hang."""
    write_encoder(tmp_path, case)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    refused, configs = 0, [{**good, key: value} for key in good for value in WEIRD]
    for config in configs:
        path.write_text(json.dumps(config))
        try:
            encoder = encoder_of(tmp_path) if isinstance(open_any(tmp_path), OpenedEncoder) else None
        except ModelLoadError:
            refused += 1
        else:
            assert encoder is not None
            assert states_of(encoder, [PAIR])[0].isfinite().all(), config
    assert refused > len(configs) // 8


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json", "modules.json"])
def test_any_nonsense_in_a_file_beside_it_is_refused_or_harmless(name, tmp_path):
    write_encoder(tmp_path, "bert-reranker", modules=("Transformer", "Pooling", "Normalize"))
    path = tmp_path / name
    good = json.loads(path.read_text()) if path.is_file() and name != "modules.json" else {}
    keys = {"max_seq_length": 4, "model_max_length": 4, "model_input_names": [], **good}
    texts = ["", "{", "[]", "3", *(json.dumps({**good, key: value}) for key in keys for value in WEIRD)]
    texts += [json.dumps([{"type": value, "path": value}]) for value in WEIRD]
    texts += [json.dumps({**good, "post_processor": {"type": "TemplateProcessing", "pair": value}}) for value in WEIRD]
    for text in texts:
        path.write_text(text)
        with contextlib.suppress(ModelLoadError):
            assert open_any(tmp_path).config.context_tokens_max >= 2


@pytest.mark.parametrize("damage", ["lost", "twice", "turned", "truncated"])
def test_a_broken_tensor_is_refused(damage, tmp_path):
    write_encoder(tmp_path, "bert")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "encoder.layer.1.intermediate.dense.weight"
    if damage == "lost":
        del tensors[name]
    elif damage == "twice":
        tensors[f"bert.{name}"] = tensors[name].clone()
    elif damage == "turned":
        tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(EngineError):
        encoder_of_any(tmp_path)


def test_half_precision_files_compute_in_float32(tmp_path):
    write_encoder(tmp_path, "bert")
    oracle_encoder("bert").half().save_pretrained(tmp_path)
    from transformers import BertModel  # seconds of importing, in every process that collects tests

    oracle = BertModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    found = states_of(encoder_of(tmp_path), PROMPTS[-1:])[0]
    torch.testing.assert_close(found, oracle_states(oracle, PROMPTS[-1]), atol=TOLERANCE, rtol=0)
