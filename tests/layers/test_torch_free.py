"""Importing torch costs a second and 200 MiB: only a process that computes with it may pay. Looked at in real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ModelNotFound
from baton.models.names import resolve

COMMANDS = [f"baton.cli.{path.stem}" for path in Path(resolve.__code__.co_filename).parents[1].glob("cli/*.py")]
MODULES = {
    "cli": COMMANDS,
    "front": ["baton.runtime.front.process", "baton.api.app", "baton.text.loading"],
    "router": ["baton.runtime.router.process"],
    "engine": ["baton.runtime.engine.process"],
    "cache": ["baton.runtime.cache.process"],
    "supervisor": ["baton.runtime.supervisor"],
    "worker": [
        "baton.runtime.worker.process",
        "baton.worker.build",
        "baton.worker.model_runner",
        "baton.worker.platforms.choose",
    ],
    "llm": ["baton.llm"],
    "native": ["baton.native.decoder", "baton.native.library", "baton.worker.forward.native_forward"],
    "models": ["baton.models.open", "baton.models.quantise", "baton.models.rotary", "baton.models.loaders.dummy"],
}
NUMPY_TOO = ["cli", "engine", "supervisor", "llm"]
"""These start faster without numpy as well."""


def loaded_after(code: str) -> str:
    """Which of the heavy packages a process has loaded after running this."""
    check = f"{code}\nimport sys; print(*[name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("process", MODULES)
def test_no_module_brings_torch(process):
    loaded = loaded_after("\n".join(f"import {module}" for module in MODULES[process]))
    assert "torch" not in loaded
    assert process not in NUMPY_TOO or "numpy" not in loaded


def test_names_and_recommendations_need_neither():
    assert loaded_after("import baton.models.names, baton.models.generation") == ""


def test_listing_models_needs_neither():
    assert loaded_after("from baton.cli.models import models; models(as_json=True)") == ""


def test_a_model_is_opened_and_its_weights_are_read_without_torch():
    try:
        path = resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    code = f"""
from pathlib import Path
from baton.models.open import open_model
from baton.models.quantise import weights_as
opened = open_model(Path({str(path)!r}))
assert opened.config.layers == 30
assert weights_as(opened.weights.raw("layers.0.mlp.down.weight"), "layers.0.mlp.down.weight", "int8").type.name == "Q8_0"
"""
    assert loaded_after(code) == "numpy"
