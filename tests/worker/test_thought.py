"""The budget of reasoning (worker/thought.py), where drafts are verified."""

from __future__ import annotations

from baton.protocol.thinking import Thinking
from baton.worker.thought import Thought


def test_drafts_use_nothing_of_the_budget():
    """Found on a GPU's executor: rows behind drafts that were refused had counted as reasoning."""
    thought = Thought(Thinking(end=94, budget=3, start=93, is_open=True))
    assert thought.forced([1]) is None
    assert thought.forced_behind([1, 2, 3]) == 94
    assert thought.forced([1, 5]) is None
    assert thought.forced([1, 5, 6]) == 94
