"""When an instance dials a router again: soon after a loss, slowly after a refusal, and when the router says so."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.redial_times import (
    HINTED_DIALS,
    REFUSED_SECONDS,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    STEADY_SECONDS,
    DialOutcome,
    RedialTimes,
)

LOST = DialOutcome("lost")
MISFIT = DialOutcome("does not fit", refused=True)
NAMED = DialOutcome("another instance has the name", refused=True, retry_seconds=0.75)


def within(delay: float, least: float, most: float) -> bool:
    return least <= delay <= most


def test_after_losses_in_a_row_less_and_less_often():
    redial = RedialTimes(Random(1))
    for place in range(12):
        longest = min(RETRY_SECONDS * 2 ** (place + 1), RETRY_SECONDS_MAX)
        assert within(redial.after(LOST), longest / 2, longest)
    assert within(redial.after(DialOutcome("lost", STEADY_SECONDS)), RETRY_SECONDS / 2, RETRY_SECONDS)
    assert not redial.refused


@pytest.mark.parametrize("seed", range(5))
def test_the_first_refusals_for_a_name_count_as_long_as_the_router_says(seed):
    """They were as slow as those of one that does not fit: an instance that had lost its machine's network came back after 5 to
    10 s, and the name was free after one."""
    redial = RedialTimes(Random(seed))
    for _ in range(HINTED_DIALS):
        assert within(redial.after(NAMED), 0.75, 0.75 * 1.2), "never before the router's time"
    for _ in range(3):
        assert within(redial.after(NAMED), REFUSED_SECONDS / 2, REFUSED_SECONDS), "the other one lives"
    assert redial.refused
    redial.after(DialOutcome("lost", 0.5))
    assert not redial.refused
    assert within(redial.after(NAMED), 0.75, 0.75 * 1.2), "a session that was open begins a new row"


def test_other_refusals_are_slow_also_while_the_router_cannot_be_reached():
    redial = RedialTimes(Random(1))
    for end in (MISFIT, LOST, LOST):
        assert within(redial.after(end), REFUSED_SECONDS / 2, REFUSED_SECONDS)
        assert redial.refused
    for seconds in (1e9, REFUSED_SECONDS):  # no router is waited for longer than that
        assert redial.after(MISFIT._replace(retry_seconds=seconds)) <= REFUSED_SECONDS
    assert RedialTimes(Random(1)).after(NAMED._replace(retry_seconds=1e-9)) >= RETRY_SECONDS
