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
