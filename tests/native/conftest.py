"""Shared by the tests of the C library: what is missing, and each variant that this machine can run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from baton.errors import ModelNotFound
from baton.models.names import resolve

MISSING = [package for package in ("torch", "numpy") if importlib.util.find_spec(package) is None]

if not MISSING:
    import torch
    from kernels import load

    from baton.native.library import Library
    from baton.native.variants import Variant, supported_variants

    # One thread: two that wait for each other spin, and beside a busy neighbour these tests then take ages.
    torch.set_num_threads(1)

sys.path.append(str(Path(__file__).parent.parent / "worker"))  # rig.py


class SkippedModule(pytest.Module):
    """Stands for a test file that could not even be imported."""

    def collect(self):
        pytest.skip(f"the kernels are compared with torch: {', '.join(MISSING)} is missing", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent):
    if not MISSING or module_path.name == "test_selftest.py":  # a C program that needs nothing
        return None
    return SkippedModule.from_parent(parent, path=module_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`library`: a test for every variant that this processor has instructions for; all but the best two in `make chaos`."""
    if "library" in metafunc.fixturenames:
        best, others = supported_variants()[:2], supported_variants()[2:]
        variants = [pytest.param(variant, id=variant.name) for variant in best]
        variants += [pytest.param(variant, id=variant.name, marks=pytest.mark.slow) for variant in others]
        metafunc.parametrize("library", variants, indirect=True, scope="session")


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    variant: Variant = request.param
    return load(variant)


@pytest.fixture(scope="session")
def tiled() -> Library:
    """The variant that attends on tiles."""
    for variant in supported_variants():
        if (library := load(variant)).has_tiles():
            return library
    pytest.skip("this processor has no tiles")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
