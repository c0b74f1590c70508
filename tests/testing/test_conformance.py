"""The importable suite on the CPU's platforms of this repository (opened.py); test_conformance_on_gpu.py has the others."""

from __future__ import annotations

import sys

import pytest
from example_package import install_example
from opened import opened

from baton.testing import PlatformConformance
from baton.testing.platforms import PlatformUnderTest

PLATFORMS = ("native", "torch", "numpy")


class TestConformance(PlatformConformance):
    @pytest.fixture(scope="class", params=PLATFORMS)
    @classmethod
    def platform(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlatformUnderTest:
        if request.param == "numpy":
            sys.path.append(str(install_example(tmp_path_factory.mktemp("installed"), "numpy_platform")))
        return opened(request.param)
