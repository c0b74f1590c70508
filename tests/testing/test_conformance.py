"""The importable suite on the platforms of this repository (platforms.py)."""

from __future__ import annotations

import sys

import pytest
from example_package import install_example

from baton.testing import PlatformConformance
from baton.testing.platforms import PlatformUnderTest

PLATFORMS = ("native", "torch", "numpy", "interpreted", "cuda", "cuda-torch", "cuda-deterministic")


class TestConformance(PlatformConformance):
    @pytest.fixture(scope="class", params=PLATFORMS)
    @classmethod
    def platform(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlatformUnderTest:
        pytest.importorskip("torch", reason="the oracle needs pip install -e '.[dev,oracle]'")
        from platforms import open_platform

        if request.param == "numpy":
            sys.path.append(str(install_example(tmp_path_factory.mktemp("installed"), "numpy_platform")))
        return open_platform(request.param)
