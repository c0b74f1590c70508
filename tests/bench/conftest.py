"""The benchmarks are programs and not a package: their folder is put where they would find it themselves."""

import sys
from pathlib import Path

import pytest

from baton.errors import ModelNotFound
from baton.models.names import resolve

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
