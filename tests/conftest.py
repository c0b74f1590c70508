"""Hypothesis here is repeatable: the same examples on every run, and no assert on wall-clock time.

BATON_HYPOTHESIS=explore pytest tests             new examples, 25 times as many
BATON_HYPOTHESIS=fast pytest tests                half of the examples (make fast)
BATON_SLOW=1 pytest tests                         also the cases that take long, twice the examples (make chaos)
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

SLOW = bool(os.environ.get("BATON_SLOW"))
settings.register_profile("repeatable", max_examples=40 if SLOW else 20, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fast", max_examples=10, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS", "repeatable"))


@pytest.fixture(autouse=True, scope="module")
def the_collector_looks_at_this_module_alone() -> None:
    """Many tests collect garbage to see what is left. A process that has loaded torch goes through millions of objects each
    time, for a second. What there is before a module begins is set aside."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def signals_are_handled_as_before():
    """A process that has let SIGPIPE end it dies in a later file, at the first write to a closed connection, without a word."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}  # pytest-timeout's
    yield
    changed = [number for number, handler in before.items() if signal.getsignal(number) != handler]
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, f"tests of this file have left other handlers of {changed}"


REAL_PROCESSES = ("chaos", "cli", "kvcache", "runtime")
"""A machine that stands still for seconds at the wrong moment fails tests of these. They get a second try, and the report
names each that needed one: one that is named often is broken."""


def pytest_collection_modifyitems(items):
    """make test has 13 minutes on two cores: what takes long and is alike to what it runs is left to make chaos."""
    for item in items:
        if item.get_closest_marker("slow") and not SLOW:
            item.add_marker(pytest.mark.skip(reason="takes long: make chaos runs it (BATON_SLOW)"))
        if item.path.relative_to(HERE).parts[0] in REAL_PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
