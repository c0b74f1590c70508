"""`baton run` and `baton models`."""

from __future__ import annotations

import json

from command_rig import baton


def test_run_prints_the_text_alone(tiny_model):
    ran = baton("run", tiny_model, "--raw", "Once", "--max-tokens", "5", "--threads", "1", "--quantization", "none")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("\n")
    assert "tok/s" in ran.stderr
    assert "tok/s" not in ran.stdout


def test_run_reads_prompts_from_a_file_and_speaks_json(tiny_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    ran = baton("run", tiny_model, "zero", "--file", file, "--json", "--max-tokens", "3", "-n", "2", "--seed", "1")
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    assert [answer["prompt"] for answer in answers] == ["zero", "one", "two"]
    for answer in answers:
        assert len(answer["outputs"]) == 2
        assert all(1 <= output["tokens"] <= 3 and output["finish_reason"] for output in answer["outputs"])


def test_run_without_a_prompt(tiny_model):
    ran = baton("run", tiny_model)
    assert ran.returncode == 1
    assert "no prompt" in ran.stderr


def test_models_lists_aliases_files_and_architectures():
    ran = baton("models")
    assert ran.returncode == 0, ran.stderr
    for words in ("smollm2", "LlamaForCausalLM", ".gguf", "Q4_K", "safetensors"):
        assert words in ran.stdout


def test_models_says_what_is_cached(tmp_path):
    snapshot = tmp_path / "hub" / "models--own--er-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"12345678")
    (snapshot / "small-q4_k_m.gguf").write_bytes(b"1234")
    ran = baton("models", "--json", XDG_CACHE_HOME=str(tmp_path), HF_HOME=str(tmp_path), HF_HUB_CACHE="")
    facts = json.loads(ran.stdout)
    assert facts["aliases"][0]["cached"] is False
    assert facts["hub"] == [
        {"name": "own/er-model@abc", "nbytes": 10, "commit": "abc", "path": str(snapshot)},
        {"name": "own/er-model:Q4_K_M@abc", "nbytes": 4, "commit": "abc", "path": str(snapshot / "small-q4_k_m.gguf")},
    ]
