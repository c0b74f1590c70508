"""The page docs/internals/adding-a-model.md, step by step: its family, its registry row, its case against transformers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_logits, oracle_model

from baton.models import registry
from baton.models.architecture import Architecture
from dense_oracle import all_logits, greedy_tokens, load_model

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-model.md"


def blocks_of(page: str) -> dict[str, str]:
    """The blocks of code whose first line is the name of a file."""
    return dict(re.findall(r"```\w+\n# (\S+\.py)\n(.*?)```", page, re.DOTALL))


def test_the_recipe_gives_a_family_that_equals_transformers(tmp_path, monkeypatch):
    blocks = blocks_of(PAGE.read_text())
    assert list(blocks) == ["seed_oss.py", "tiny_models.py"]
    written: dict[str, type[Architecture]] = {}
    exec(compile(blocks["seed_oss.py"], "seed_oss.py", "exec"), written)
    family = written["SeedOss"]
    assert family.name not in registry.ARCHITECTURES, "the page needs another example"
    monkeypatch.setitem(registry.ARCHITECTURES, family.name, family)
    for name in family.hf_names:
        monkeypatch.setitem(registry._BY_HF_NAME, name, family)
    for case, row in ast.literal_eval(blocks["tiny_models.py"]).items():
        monkeypatch.setitem(CASES, case, row)
        oracle = oracle_model(case)
        oracle.save_pretrained(tmp_path)
        model = load_model(tmp_path).model
        for prompt in PROMPTS:
            torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
            assert greedy_tokens(model, prompt, 8) == oracle_greedy(oracle, prompt, 8)
