"""Ranks of `baton serve` on a CPU: two instances of two ranks each behind one port, and a number of ranks that is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_rig import baton, family, gone, said, serving

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


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused_in_words(tiny_model):
    ran = baton("serve", tiny_model, *SMALL, "--device", "cpu", "--tp", "3", "--port", "0")
    assert ran.returncode == 1
    assert re.search(
        r"baton serve: rank \d: --tensor-parallel-size 3: the model has \d+ query heads, which 3 ranks cannot share", said(ran)
    )
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
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
