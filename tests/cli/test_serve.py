"""`baton serve` with a real model in real processes: starts, answers, ends; and says what is wrong in one line."""

from __future__ import annotations

import socket

from command_rig import baton, family, gone, said, serving


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
        assert len(everyone) == 4, "supervisor, front, engine, worker"
        code, err = server.interrupt()
        assert code == 0
        assert "draining" in err
        assert not gone(everyone)


def test_a_small_pool_is_told(tiny_model):
    with serving(tiny_model, "--num-gpu-blocks-override", "8") as server:
        assert "8 blocks of 16 tokens" in server.text
        code, err = server.interrupt()
    assert code == 0
    assert "raise --kv-blocks" in err


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
    ran = baton("serve", "no-such-model", "--slots", "0")
    assert ran.returncode == 1
    assert "slots" in said(ran)


def test_memory_that_holds_no_sequence(tiny_model):
    ran = baton("serve", tiny_model, "--port", "0", "--kv-memory-gib", "0.00001")
    assert ran.returncode == 1
    assert "raise kv_memory_gib" in said(ran)
    assert ran.stderr.count("\n") == 1


def test_unknown_key_in_the_file(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("slot: 5\n")
    ran = baton("serve", "--config", file)
    assert ran.returncode == 1
    assert "did you mean slots?" in ran.stderr
