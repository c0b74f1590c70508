"""The page docs/internals/adding-a-model.md, step by step: its family, its registry row, its case against transformers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tiny_models import CASES

from baton.models.families import seed_oss
from baton.models.registry import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-model.md"


def blocks_of(page: str) -> dict[str, str]:
    """The blocks of code whose first line is the name of a file."""
    return dict(re.findall(r"```\w+\n# (\S+\.py)\n(.*?)```", page, re.DOTALL))


def test_the_example_of_the_page_is_a_family_of_the_registry():
    """tests/models/test_model_architectures.py compares it with transformers."""
    blocks = blocks_of(PAGE.read_text())
    assert list(blocks) == ["seed_oss.py", "tiny_models.py"]
    assert blocks["seed_oss.py"] == Path(seed_oss.__file__).read_text()
    assert ARCHITECTURES[seed_oss.SeedOss.name] is seed_oss.SeedOss
    for case, row in ast.literal_eval(blocks["tiny_models.py"]).items():
        assert CASES[case] == row
