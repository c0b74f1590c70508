"""Platforms of platforms.py, once it is known that the oracle is here."""

from __future__ import annotations

import pytest

from baton.testing.platforms import PlatformUnderTest


def opened(name: str) -> PlatformUnderTest:
    pytest.importorskip("torch", reason="the oracle needs pip install -e '.[dev,oracle]'")
    from platforms import open_platform

    return open_platform(name)
