"""Fixtures of the tests with real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("torch", "starlette", "uvicorn", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason="servers need pip install -e '.[dev,oracle]'")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "trust")]

from chaos_model import make_model  # noqa: E402
from chaos_server import Server  # noqa: E402
from chaos_shared import SharedServers  # noqa: E402

from baton.errors import ModelNotFound  # noqa: E402
from baton.models.names import resolve  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    servers = SharedServers(tmp_path_factory.mktemp)
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def alone(tiny: Path, shared_servers: SharedServers) -> Server:
    """The undisturbed run: one instance, no router, no lower tier."""
    return shared_servers.of(tiny)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
