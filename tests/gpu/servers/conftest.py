"""The tests of tests/chaos, unchanged, with every server and instance on the GPU.

Each file here takes the tests of one file there. In float32, and in the mode whose results do not depend on the batch, so
that "the tokens of an undisturbed run" are one answer and not one of several that differ by rounding.

BATON_SERVERS_ON_CPU=1 runs them on the CPU, to see that a new file works before there is a GPU. Tests of the GPU's memory fail
there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason="servers on a GPU need pip install -e '.[dev,oracle]'")

sys.path.append(str(Path(__file__).parents[2] / "chaos"))

from chaos_model import make_model  # noqa: E402
from chaos_server import ON_DEVICE, Server  # noqa: E402
from chaos_shared import SharedServers  # noqa: E402

ON_CPU = bool(os.environ.get("BATON_SERVERS_ON_CPU"))
SETTINGS = {"device": "cpu" if ON_CPU else "cuda", "dtype": "float32", "deterministic": True}


@pytest.fixture(scope="module", autouse=True)
def on_gpu() -> Iterator[None]:
    if not ON_CPU and not Path("/dev/nvidia0").exists():
        pytest.skip("no GPU here")
    ON_DEVICE.update(SETTINGS)
    yield
    ON_DEVICE.clear()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    """Only within a file: others look at the memory of the GPU."""
    servers = SharedServers(tmp_path_factory.mktemp)
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def alone(tiny: Path, shared_servers: SharedServers) -> Server:
    return shared_servers.of(tiny)
