"""Embeddings and reranking with encoders through a real server: real processes, real weights, unmodified clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import urllib.error
from pathlib import Path

import openai
import pytest
from command_rig import baton as run_baton
from command_rig import family, said, serving

sys.path.append(str(Path(__file__).parent.parent / "models"))
tiny_encoders = pytest.importorskip("tiny_encoders", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

TEXTS = ["the baton is a short stick", "un", "the next runner passes a stick to the runner . " * 20]
DOCUMENTS = ["a stick", "the next runner is short", "the baton passes"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of an embedding model, the same with other weights, and a reranker; with their oracles."""
    base = tmp_path_factory.mktemp("encoders")
    modules = ("Transformer", "Pooling", "Normalize")
    found = {}
    for name, case, seed in (("embedder", "bert", 0), ("other", "bert", 5), ("reranker", "bert-reranker", 0)):
        folder = base / name
        folder.mkdir()
        found[name] = folder, tiny_encoders.write_encoder(folder, case, seed=seed, modules=None if "re" in case else modules)
    return found


def vector_of(folder: Path, oracle, text: str) -> list[float]:
    """sentence-transformers' arithmetic: tokens cut to the model's length, the mean of the states, length 1."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    with torch.inference_mode():
        mean = oracle(input_ids=torch.tensor([tokenizer.encode(text).ids]))[0][0].mean(0)
        return torch.nn.functional.normalize(mean, dim=0).tolist()


def score_of(folder: Path, oracle, query: str, document: str) -> float:
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(query, document)
    ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
    with torch.inference_mode():
        return float(torch.sigmoid(oracle(input_ids=ids, token_type_ids=types).logits[0, 0]))


def check_vectors(server, folder: Path, oracle) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.embeddings.create(model="enc", input=TEXTS)
    for entry, text in zip(answer.data, TEXTS, strict=True):
        assert entry.embedding == pytest.approx(vector_of(folder, oracle, text), abs=1e-4)


def test_embeddings_of_an_encoder(folders):
    """The openai client gets sentence-transformers' vectors."""
    folder, oracle = folders["embedder"]
    with serving(folder, "--served-model-name", "enc") as server:
        assert "an encoder, for vectors; texts of 64 tokens" in server.text
        check_vectors(server, folder, oracle)
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/v1/chat/completions", {"model": "enc", "messages": [{"role": "user", "content": "Hello"}]})
        assert refused.value.code == 400


@pytest.mark.slow  # torch is loaded once more
def test_embeddings_after_a_killed_worker(folders):
    folder, oracle = folders["embedder"]
    with serving(folder, "--served-model-name", "enc") as server:
        check_vectors(server, folder, oracle)
        everyone = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(server.process.pid)}
        os.kill(next(pid for pid, command in everyone.items() if b"runtime.worker" in command), signal.SIGKILL)
        check_vectors(server, folder, oracle)


@pytest.mark.slow  # four starts of a worker; tests/runtime/engine/test_worker_supervisor.py has weights that do not fit
def test_sleep_and_other_weights(folders):
    (folder, oracle), (other, other_oracle) = folders["embedder"], folders["other"]
    with serving(folder, "--served-model-name", "enc") as server:
        assert server.post("/v1/sleep", {})["mode"] == "asleep"
        assert server.post("/v1/wake", {})["mode"] == "serving"
        check_vectors(server, folder, oracle)
        assert server.post("/v1/weights", {"path": str(other)})["mode"] == "serving"
        check_vectors(server, folder, other_oracle)
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/v1/weights", {"path": str(folders["reranker"][0])})
        assert "another kind" in json.loads(refused.value.read())["error"]["message"]
        check_vectors(server, folder, other_oracle)
        assert server.interrupt()[0] == 0


def test_reranking_with_a_cross_encoder(folders):
    folder, oracle = folders["reranker"]
    with serving(folder, "--served-model-name", "enc") as server:
        assert "scores of pairs" in server.text
        answer = server.post("/v1/rerank", {"model": "enc", "query": "the baton", "documents": DOCUMENTS})
        expected = [score_of(folder, oracle, "the baton", document) for document in DOCUMENTS]
        assert [each["index"] for each in answer["results"]] == sorted(range(3), key=lambda place: -expected[place])
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[place] for place in range(3)] == pytest.approx(expected, abs=1e-4)
        scores = server.post("/score", {"model": "enc", "text_1": "the baton", "text_2": DOCUMENTS})["data"]
        assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-4)
        (row,) = server.post("/classify", {"model": "enc", "input": "the baton"})["data"]
        assert (row["label"], row["num_classes"]) == ("LABEL_0", 1)


DAMAGES = ["config", *(pytest.param(each, marks=pytest.mark.slow) for each in ("weights", "tokenizer"))]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_refused_in_one_line(folders, tmp_path, damage):
    shutil.copytree(folders["embedder"][0], tmp_path / "broken")
    if damage == "config":
        raw = json.loads((tmp_path / "broken" / "config.json").read_text())
        (tmp_path / "broken" / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    else:
        (tmp_path / "broken" / {"weights": "model.safetensors", "tokenizer": "tokenizer.json"}[damage]).unlink()
    ran = run_baton("serve", tmp_path / "broken", "--port", "0")
    assert ran.returncode == 1
    words = {"weights": "model.safetensors", "tokenizer": "tokenizer.json", "config": "tensors are missing"}[damage]
    assert words in said(ran)
    assert "Traceback" not in said(ran)
