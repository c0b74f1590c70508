"""What a machine does not have is skipped, with the reason.

Kernels of the GPU run in Triton's interpreter where there is no GPU. That is slow: of the interpreted ones `make test` runs
QUICK, and `make chaos` all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "worker"), str(TESTS / "gpu"), str(TESTS / "kvcache")]
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

QUICK = ("test_greedy_tokens_in_any_chunks[interpreted-5]",)


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py looks for what is slow
def pytest_collection_modifyitems(items):
    for item in items:
        interpreted = item.path.parent == Path(__file__).parent and "[interpreted" in item.name
        if interpreted and item.name not in QUICK:
            item.add_marker(pytest.mark.slow)
