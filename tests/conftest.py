"""Hypothesis here is repeatable: the same examples on every run, and no assert on wall-clock time.

BATON_HYPOTHESIS=explore pytest tests             new examples, ten times as many
BATON_SLOW=1 pytest tests                         also the cases that take long (make chaos)
"""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", max_examples=40, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS", "repeatable"))


def pytest_collection_modifyitems(items):
    """make test has 20 minutes on two cores: what takes long and is alike to what it runs is left to make chaos."""
    if not os.environ.get("BATON_SLOW"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes long: make chaos runs it (BATON_SLOW)"))
