"""The benches of everything but the model start real processes with a worker that computes nothing: it must be one that the
engine accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ModelNotFound
from baton.models.names import DEFAULT_MODEL, resolve

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_host_measures_a_server():
    try:
        resolve(DEFAULT_MODEL)
    except ModelNotFound as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
    command = [sys.executable, "bench/host.py", "--http", "1", "--offline", "", "--output", "120", "--step-ms", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)
    assert case["tokens"] == 120
    assert case["us_per_token"].keys() >= {"front", "engine", "worker"}
