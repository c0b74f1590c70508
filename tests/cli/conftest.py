from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

NEEDED = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (pip install 'baton[cpu,serve]')")
    from command_rig import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
