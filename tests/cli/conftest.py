from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))  # the fake hub

NEEDED = ("torch", "safetensors", "tokenizers", "starlette", "uvicorn")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (pip install -e '.[dev,oracle]')")
    from command_rig import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template, and makers who say how it should be sampled."""
    from command_rig import CHAT_TEMPLATE, RECOMMENDED

    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return folder
