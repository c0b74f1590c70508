"""Fixtures of the tests with real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for package in ("torch", "starlette", "uvicorn", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason="servers need pip install -e '.[dev,oracle]'")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "trust")]

from chaos_model import make_model  # noqa: E402

from baton.errors import ModelNotFound  # noqa: E402
from baton.models.names import resolve  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
