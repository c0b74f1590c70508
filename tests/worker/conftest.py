"""Shared by the worker tests: what is missing, threads, and the tiny transformers models of the model tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from baton.errors import ModelNotFound
from baton.models.names import resolve

MISSING = [package for package in ("torch", "numpy") if importlib.util.find_spec(package) is None]

if not MISSING:
    import torch

    # One thread: two that wait for each other spin, and beside a busy neighbour these tests then take ages.
    torch.set_num_threads(1)

sys.path.append(str(Path(__file__).parent.parent / "models"))  # tiny_models.py


class SkippedModule(pytest.Module):
    """Stands for a test file that could not even be imported."""

    def collect(self):
        pytest.skip(f"the worker needs {', '.join(MISSING)} (pip install -e '.[dev,oracle]')", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
