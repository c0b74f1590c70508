"""Vectors and scores of texts are those of the sentence-transformers package: tokens, truncation, pooling, length."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from rig import Rig
from test_encoder_executor import loaded
from tiny_encoders import WORDS, write_encoder

from baton.models.open import open_encoder
from baton.text.tokenizer import Tokenizer

sentence_transformers = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")

PLAIN = [word for word in WORDS if word.isalpha()]
TEXTS = [" ".join(random.Random(count).choices(PLAIN, k=count)) for count in (1, 3, 9, 30, 90)]


def folder_of(folder, case: str, **files):
    write_encoder(folder, case, **files)
    types = ["token_type_ids"] if case.startswith("bert") else []  # as the tokenizers of these models say by their class
    inputs = {"model_input_names": ["input_ids", *types, "attention_mask"]}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", **inputs}))
    return folder


def answers(folder, prompts: list[list[int]], **sampling) -> list[np.ndarray]:
    rig = Rig(loaded(folder))
    for place, prompt in enumerate(prompts):
        rig.submit(str(place), prompt, max_tokens=1, **sampling)
    rig.run()
    rows = {int(name): next(row.embedding for row in rows if row.embedding) for (name, _), rows in rig.logprobs.items()}
    return [np.frombuffer(rows[place], "<f4") for place in range(len(prompts))]


@pytest.mark.parametrize("modules", [("Transformer", "Pooling", "Normalize"), ("Transformer", "Pooling")])
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("case", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_vectors(case, pooling, modules, tmp_path):
    folder = folder_of(tmp_path, case, modules=modules, pooling=pooling)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    tokenizer, opened = Tokenizer.from_path(folder), open_encoder(folder)
    room = opened.config.context_tokens_max - 1 - 2
    prompts = [
        [*tokenizer.prefix_ids, *tokenizer.encode_beginning(text, room, parse_special=True), *tokenizer.suffix_ids]
        for text in TEXTS
    ]
    assert max(map(len, prompts)) == 40
    for found, vector in zip(answers(folder, prompts, pooling=opened.pooling), expected, strict=True):
        np.testing.assert_allclose(found, vector, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["bert-reranker", "xlm-roberta-reranker", "distilbert-reranker", "modernbert-reranker"])
def test_scores(case, tmp_path):
    folder = folder_of(tmp_path, case)
    pairs = [(one, other) for one in TEXTS[:4] for other in TEXTS]
    longest = open_encoder(folder).config.context_tokens_max - 1
    expected = sentence_transformers.CrossEncoder(str(folder), device="cpu", max_length=longest).predict(pairs)
    tokenizer = Tokenizer.from_path(folder)
    prompts = [tokenizer.encode_pair(one, other, longest) for one, other in pairs]
    found = [1 / (1 + math.exp(-logits[0])) for logits in answers(folder, prompts, pooling="cls", label_ids=(0,))]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
