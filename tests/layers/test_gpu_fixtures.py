"""Tests of servers on a GPU find their fixtures. Without a GPU each test skips before it asks for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVERS = Path(__file__).parents[1] / "gpu" / "servers"


@pytest.mark.slow  # five seconds, for tests that seldom change
def test_every_test_of_servers_on_a_gpu_finds_its_fixtures():
    for package in ("torch", "starlette", "uvicorn", "safetensors", "tokenizers"):
        pytest.importorskip(package, reason="those tests need it too")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--setup-plan", str(SERVERS)]
    environment = {**os.environ, "BATON_SERVERS_ON_CPU": "1", "BATON_SLOW": "1"}
    done = subprocess.run(command, env=environment, cwd=SERVERS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith(("E  ", "ERROR")))
    assert "test_killed_and_stalled_workers_change_nothing" in done.stdout
