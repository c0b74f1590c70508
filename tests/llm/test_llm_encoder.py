"""`LLM` with an encoder: vectors of any number of texts, long ones cut, and nothing generated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parent.parent / "models"))
tiny_encoders = pytest.importorskip("tiny_encoders", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
import torch  # noqa: E402

from baton.errors import CallerError  # noqa: E402
from baton.llm import LLM  # noqa: E402


def test_vectors_of_an_encoder(tmp_path):
    oracle = tiny_encoders.write_encoder(
        tmp_path, "modernbert", modules=("Transformer", "Pooling", "Normalize"), pooling="cls_token"
    )
    texts = ["the baton", "a short stick is passing to the next runner", "the runner passes " * 100]
    with LLM(str(tmp_path), threads=1) as llm:
        found = llm.embed(texts)
        for text, each in zip(texts, found, strict=True):
            ids = each.prompt_token_ids
            assert ids == llm.tokenizer.encode(text) or (len(ids), ids[0], ids[-1]) == (64, 2, 3)
            with torch.inference_mode():
                state = oracle(input_ids=torch.tensor([list(ids)]))[0][0, 0]
            assert each.outputs.embedding == pytest.approx(torch.nn.functional.normalize(state, dim=0).tolist(), abs=1e-4)
        with pytest.raises(CallerError, match="generates no text"):
            llm.generate("the baton")
        assert len(llm.embed("the baton")) == 1


def test_scores_of_a_cross_encoder(tmp_path):
    pair = ("a short stick", "the runner passes the baton")
    oracle = tiny_encoders.write_encoder(tmp_path, "bert-reranker")
    encoded = tiny_encoders.word_piece().encode(*pair)
    with LLM(str(tmp_path), threads=1) as llm:
        both = llm.score(pair[0], [pair[1], pair[0]])
        with torch.inference_mode():
            types = torch.tensor([encoded.type_ids])
            logit = oracle(input_ids=torch.tensor([encoded.ids]), token_type_ids=types).logits[0, 0]
        assert both[0].outputs.score == pytest.approx(float(logit.sigmoid()), abs=1e-4)
        assert both[1].outputs.score != both[0].outputs.score
        assert llm.score("a", []) == []
        with pytest.raises(CallerError, match="as many of both"):
            llm.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(CallerError, match="none may be empty"):
            llm.score("a", ["b", ""])


def test_scores_of_an_embedding_model_are_cosines(tmp_path):
    tiny_encoders.write_encoder(tmp_path, "modernbert", modules=("Transformer", "Pooling"), pooling="mean_tokens")
    with LLM(str(tmp_path), threads=1) as llm:
        one, other = (torch.tensor(each.outputs.embedding) for each in llm.embed(["the baton", "a runner"]))
        found = llm.score("the baton", "a runner")[0].outputs.score
        assert found == pytest.approx(float(torch.nn.functional.cosine_similarity(one, other, dim=0)), abs=1e-4)
        with pytest.raises(CallerError, match="no classes"):
            llm.classify("the baton")


def test_classes_of_texts(tmp_path):
    oracle = tiny_encoders.write_encoder(tmp_path, "bert-classes")
    with LLM(str(tmp_path), threads=1) as llm:
        found = llm.classify(["the baton", "a runner is passing"])
        for each in found:
            with torch.inference_mode():
                probs = oracle(input_ids=torch.tensor([list(each.prompt_token_ids)])).logits[0].softmax(0)
            assert each.outputs.probs == pytest.approx(probs.tolist(), abs=1e-4)
            assert each.outputs.label == llm.labels[int(probs.argmax())]
            assert each.outputs.num_classes == 3
