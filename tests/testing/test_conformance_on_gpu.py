"""The importable suite on the GPU's platforms: its kernels in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
from opened import opened

from baton.testing import PlatformConformance
from baton.testing.platforms import PlatformUnderTest

PLATFORMS = ("interpreted", "cuda", "cuda-torch", "cuda-deterministic")


class TestConformanceOnGpu(PlatformConformance):
    @pytest.fixture(scope="class", params=PLATFORMS)
    @classmethod
    def platform(cls, request: pytest.FixtureRequest) -> PlatformUnderTest:
        return opened(request.param)
