"""`baton serve` with a real model in real processes: starts, answers, ends; and says what is wrong in one line."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from command_rig import RECOMMENDED, baton, family, gone, said, serving

ROOT = Path(__file__).parents[2]


def test_start_answer_and_end(tiny_model):
    with serving(tiny_model, "--kv-memory-gib", "0.05", "--served-model-name", "tiny") as server:
        assert "serves tiny" in server.text
        assert "curl " in server.text
        assert "KV cache" in server.text
        assert server.get("/health") is not None
        assert b"<html" in server.get("/").lower()
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = server.post("/v1/chat/completions", body)
        assert answer["usage"]["completion_tokens"] >= 1
        everyone = family(server.process.pid)
        assert len(everyone) == 5, "supervisor, front, its templates, engine, worker"
        code, err = server.interrupt()
        assert code == 0
        (draining,) = [line for line in err.splitlines() if "draining" in line]
        assert draining in (ROOT / "docs" / "cli.md").read_text(), "the page shows what is printed"
        assert not gone(everyone)


@pytest.mark.parametrize(
    ("options", "option"),
    [(("--num-gpu-blocks-override", "8"), "--kv-blocks 32"), (("--kv-memory-gib", "0.00002"), "--kv-memory-gib 0.01")],
)
def test_a_context_larger_than_the_pool_is_lowered_and_said(chat_model, options, option):
    """A chat that names no length runs to the end of what fits: it is not refused for the size of the pool."""
    with serving(chat_model, *options, "--served-model-name", "tiny") as server:
        (model,) = json.loads(server.get("/v1/models"))["data"]
        context = model["max_model_len"]
        assert context < 512
        assert f"{context} tokens of context" in server.text
        body = {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"257": -100}}
        answer = server.post("/v1/chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == context
        code, err = server.interrupt()
    assert code == 0
    (line,) = [line for line in err.splitlines() if "lowered" in line]
    assert f"{context} tokens" in line
    assert option in line


def test_a_context_that_was_asked_for_and_does_not_fit(tiny_model):
    ran = baton("serve", tiny_model, "--port", "0", "--kv-blocks", "8", "--max-model-len", "200")
    assert ran.returncode == 1
    assert "a context of 200 tokens needs 13 blocks of 16 tokens" in said(ran)
    assert "lower max_model_len to 128" in said(ran)


def test_every_dialect_says_the_same(chat_model):
    """One model behind OpenAI's, Anthropic's and Ollama's routes; and vectors from the worker's own kernels."""
    messages = [{"role": "user", "content": "Hi"}]
    with serving(chat_model, "--served-model-name", "tiny") as server:
        same = {"model": "tiny", "temperature": 0, "logit_bias": {"257": -100}}
        told = server.post("/v1/chat/completions", {**same, "messages": messages, "max_tokens": 8})["choices"][0]["message"]
        response = server.post("/v1/responses", {**same, "input": "Hi", "max_output_tokens": 8})
        message = server.post("/v1/messages", {**same, "messages": messages, "max_tokens": 8})
        options = {"num_predict": 8, "temperature": 0}
        ollama = {"model": "tiny", "messages": messages, "options": options, "stream": False, "logit_bias": {"257": -100}}
        assert response["output"][0]["content"][0]["text"] == told["content"]
        assert message["content"][0]["text"] == told["content"]
        assert server.post("/api/chat", ollama)["message"]["content"] == told["content"]
        asked = {"model": "tiny", "input": ["Hello there", "Hello there", "Bye"]}
        for pooling in ("mean", "last"):
            data = server.post("/v1/embeddings", {**asked, "pooling": pooling})["data"]
            first, again, other = (entry["embedding"] for entry in data)
            assert first == again != other
            assert abs(sum(number * number for number in first) - 1.0) < 1e-5
        assert server.interrupt()[0] == 0


def test_every_way_in_samples_as_the_model_recommends(chat_model):
    """Server and defaults through real processes: what GET /v1/models and /config show is what requests get."""
    with serving(chat_model, "--served-model-name", "tiny") as server:
        (model,) = json.loads(server.get("/v1/models"))["data"]
        assert model["sampling_defaults"] == RECOMMENDED
        config = json.loads(server.get("/config"))
        assert config["model"]["sampling_defaults"] == RECOMMENDED
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefill_tokens_beside_decodes": 128, "decode_gap_ms": 25}
        assert {name: config["serve"][name] for name in sizes} == sizes, "what was chosen for the device"
        assert config["plan"]["chosen_for_device"] == ", ".join(sizes)
        assert "--max-num-seqs 64, --max-num-batched-tokens 512" in server.text
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 5, "logit_bias": {"257": -100}}
        unsaid = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        said_so = server.post("/v1/chat/completions", {**body, **RECOMMENDED})["choices"][0]["message"]["content"]
        assert unsaid == said_so
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        assert unsaid != server.post("/v1/chat/completions", {**body, **plain})["choices"][0]["message"]["content"]
        ran = baton("chat", "--url", server.url, "--seed", "5", "--max-tokens", "12", stdin="Hi\n")
        asked = baton("chat", "--url", server.url, "--seed", "5", "--max-tokens", "12", "--temperature", "2", stdin="Hi\n")
    again = baton("run", chat_model, "Hi", "--max-tokens", "12", "--seed", "5", "--json")
    assert ran.returncode == asked.returncode == again.returncode == 0, ran.stderr + asked.stderr + again.stderr
    free = {name: value for name, value in body.items() if name != "logit_bias"}
    with serving(chat_model, "--generation-config", "none") as server:
        (model,) = json.loads(server.get("/v1/models"))["data"]
        assert model["sampling_defaults"] == plain | {"min_p": 0.0}
        text = server.post("/v1/chat/completions", {**free, **RECOMMENDED})["choices"][0]["message"]["content"]
    assert ran.stdout == text + "\n"
    assert asked.stdout != ran.stdout
    assert json.loads(again.stdout)[0]["outputs"][0]["text"] == text


def test_port_taken(tiny_model):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ran = baton("serve", tiny_model, "--port", str(sock.getsockname()[1]))
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "another --port" in ran.stderr


def test_unknown_model():
    ran = baton("serve", "no-such-model", "--port", "0")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "no such model" in ran.stderr
    assert "smollm2" in ran.stderr


def test_contradictions_are_said_before_anything_starts():
    ran = baton("serve", "no-such-model", "--max-num-seqs", "0")
    assert ran.returncode == 1
    assert "--max-num-seqs" in said(ran)


@pytest.mark.slow
def test_memory_that_holds_no_sequence(tiny_model):
    ran = baton("serve", tiny_model, "--port", "0", "--kv-memory-gib", "0.000001")
    assert ran.returncode == 1
    assert "raise kv_memory_gib" in said(ran)
    assert ran.stderr.count("\n") == 1


def test_unknown_key_in_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max_num_seq: 5\n")
    ran = baton("serve", "--config", file)
    assert ran.returncode == 1
    assert "did you mean max_num_seqs?" in ran.stderr


def ask(url: str, path: str, *, key: str = "", body: dict | None = None, **headers: str) -> tuple[int, bytes]:
    sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {}), **headers}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, sent), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_keys_ports_origins_and_logs_of_a_real_server(tiny_model):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        admin_port = sock.getsockname()[1]
    flags = ["--api-key", "client-secret", "--admin-api-key", "admin-secret", "--admin-port", str(admin_port)]
    flags += ["--allowed-origins", "https://ui.example", "--unknown-fields", "refuse", "--log-format", "json"]
    with serving(tiny_model, "--kv-memory-gib", "0.05", "--served-model-name", "tiny", *flags) as server:
        admin = f"http://127.0.0.1:{admin_port}"
        assert f"admin      {admin}/metrics" in server.text
        assert ask(server.url, "/metrics", key="admin-secret")[0] == 404
        assert ask(admin, "/metrics", key="client-secret")[0] == 403
        assert ask(admin, "/metrics", key="admin-secret")[0] == 200
        body = {"prompt": "the secret words", "max_tokens": 3, "ignore_eos": True}
        assert ask(server.url, "/v1/completions", key="client-secret", body=body)[0] == 200
        assert ask(server.url, "/v1/completions", key="client-secret", body={**body, "foo": 1})[0] == 400
        assert ask(server.url, "/v1/completions", key="client-secret", body=body, Origin="http://evil.example")[0] == 403
        assert ask(server.url, "/v1/completions", key="client-secret", body=body, Origin="https://ui.example")[0] == 200
        assert ask(admin, "/config", key="admin-secret")[1].count(b"-secret") == 0
        code, err = server.interrupt()
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    requests = [line for line in lines if line["message"] == "request"]
    assert [line["status"] for line in requests if line["route"] == "/v1/completions"] == [200, 400, 403, 200]
    first = next(line for line in requests if line["route"] == "/v1/completions")
    assert (first["completion_tokens"], first["end"], first["process"]) == (3, "length", "front")
    assert first["prompt_tokens"] > 0
    assert "secret" not in err


@pytest.mark.slow
def test_log_level_and_client_keys_alone(tiny_model):
    with serving(tiny_model, "--kv-memory-gib", "0.05", "--api-key", "client-secret", "--log-level", "warning") as server:
        status, answer = ask(server.url, "/v1/pause", key="client-secret", body={})
        assert status == 403
        assert b"--admin-api-key" in answer
        fingerprint = json.loads(ask(server.url, "/v1/completions", key="client-secret", body={"prompt": "x"})[1])
        assert fingerprint["system_fingerprint"] not in ("fp_baton", "")
        code, err = server.interrupt()
    assert code == 0
    assert "request" not in err.replace("running requests", "")


def test_a_taken_admin_port_is_said(tiny_model):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ran = baton("serve", tiny_model, "--port", "0", "--admin-port", str(sock.getsockname()[1]))
    assert ran.returncode == 1
    assert "another --admin-port" in ran.stderr
