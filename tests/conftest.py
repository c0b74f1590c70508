"""Hypothesis here is repeatable: the same examples on every run, and no assert on wall-clock time.

BATON_HYPOTHESIS=explore pytest tests             new examples, ten times as many
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", max_examples=40, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS", "repeatable"))
