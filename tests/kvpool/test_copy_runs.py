"""Blocks that lie side by side are copied together: one DMA for many blocks, and every block once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kvpool.copies import CopySpan, runs_of


def test_neighbours_are_one_run():
    assert runs_of([4, 5, 6, 9], [1, 2, 3, 4]) == [CopySpan(4, 1, 3), CopySpan(9, 4, 1)]
    assert runs_of([6, 5, 4], [3, 2, 1]) == [CopySpan(4, 1, 3)], "freed blocks often come back in reverse"
    assert runs_of([1, 2, 3], [3, 2, 1]) == [CopySpan(1, 3, 1), CopySpan(2, 2, 1), CopySpan(3, 1, 1)]
    assert runs_of([], []) == []


@given(st.data())
def test_every_block_goes_where_it_should(data):
    count = data.draw(st.integers(0, 12))
    sources, targets = (data.draw(st.permutations(range(14)))[:count] for _ in range(2))
    copied = [(run.source + n, run.target + n) for run in runs_of(sources, targets) for n in range(run.blocks)]
    assert sorted(copied) == sorted(zip(sources, targets, strict=True))
