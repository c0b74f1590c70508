"""The whole test of a platform: the suite says what it must compute. `pip install 'baton-serve[testing]'`, then `pytest`."""

from baton.testing import PlatformConformance


class TestNumpyPlatform(PlatformConformance):
    device = "numpy"
