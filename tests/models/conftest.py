"""Shared by the model tests: tiny models made by transformers, and the one real model we can always fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="models need torch (pip install 'baton[cpu]')")
pytest.importorskip("safetensors", reason="models need safetensors (pip install 'baton[cpu]')")

from baton.errors import ModelNotFound  # noqa: E402
from baton.models.names import resolve  # noqa: E402

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
