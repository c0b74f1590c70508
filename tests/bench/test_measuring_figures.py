"""From the steps of a driver to figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measuring.figures import NotMeasured, decode_rate, full_steps, largest_rise, line_through, percentile, step_seconds

# 32 sequences: 20 get their first token while the others are still read, and 12 are left at the end.
STEPS = [(0.31, 20), (0.35, 32), (0.39, 32), (0.44, 32), (0.48, 12)]


def test_only_steps_between_two_full_ones_are_decoding_alone():
    assert full_steps(STEPS, 32) == pytest.approx([0.04, 0.05])


def test_a_step_is_the_median_so_one_hiccup_does_not_count():
    steps = [(0.1 * n, 4) for n in range(8)]
    hiccup = [*steps, (5.0, 4)]
    assert step_seconds(hiccup, 4) == pytest.approx(0.1)


def test_too_few_full_steps_are_no_figure():
    with pytest.raises(NotMeasured, match="2 steps in which all 32"):
        step_seconds(STEPS, 32)


def test_decode_rate_leaves_the_prompt_out():
    # Two steps of a prompt in chunks, the first token at 2.0 s, four more within a second.
    steps = [(1.0, 0), (2.0, 1), (2.25, 1), (2.5, 1), (2.75, 1), (3.0, 1)]
    assert decode_rate(steps) == pytest.approx(4.0)
    with pytest.raises(NotMeasured):
        decode_rate([(1.0, 1)])


def test_percentile_lies_between_the_two_nearest():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([4.0], 0.99) == 4.0


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.lists(st.integers(0, 5000), min_size=2, max_size=9, unique=True))
def test_a_line_is_found_again(base, slope, xs):
    line = line_through([(x, base + slope * x) for x in xs])
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert line.base == pytest.approx(base, rel=1e-4, abs=1.0)


def test_a_curve_is_no_line():
    assert line_through([(x, float(x) ** 3) for x in range(6)]).fit < 0.9
    with pytest.raises(NotMeasured):
        line_through([(1.0, 2.0), (1.0, 3.0)])


def test_the_largest_rise_is_against_the_cheapest_before():
    assert largest_rise([100.0, 60.0, 40.0]) == 0.0
    assert largest_rise([100.0, 50.0, 55.0, 60.0, 40.0]) == pytest.approx(0.2)
