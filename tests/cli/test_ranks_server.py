"""`baton serve --data-parallel-size 2 --tensor-parallel-size 2` on a CPU: two instances with two ranks each behind one port."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_rig import family, gone, serving

pytestmark = pytest.mark.slow

SMALL = ("--kv-memory-gib", "0.05", "--threads", "1", "--quantization", "none", "--served-model-name", "tiny")
BODY = {
    "model": "tiny",
    "prompt": "Two ranks",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def workers(pids: list[int]) -> int:
    words = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids]
    return sum(b"baton.runtime.worker" in each for each in words)


def test_two_instances_of_two_ranks_answer_as_one_process_does(tiny_model):
    with serving(tiny_model, *SMALL, "--device", "cpu") as server:
        expected = server.post("/v1/completions", BODY)["choices"][0]["token_ids"]
    with serving(tiny_model, *SMALL, "--device", "cpu", "--tp", "2", "--data-parallel-size", "2") as server:
        everyone = family(server.process.pid)
        assert workers(everyone) == 4
        assert "mixed-0, mixed-1" in server.text
        for number in range(4):
            answer = server.post("/v1/completions", BODY | {"user": str(number)})
            assert answer["choices"][0]["token_ids"] == expected
        code, _ = server.interrupt()
        assert code == 0
        assert not gone(everyone)
