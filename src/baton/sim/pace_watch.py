"""30, for instances with a goal for the gap between tokens: prompts beside decodes keep near it.

The cost per step is known here: `step_seconds` and `token_seconds` of the scenario. The instance has to learn it, from times
that vary, so the check allows some steps for that, and steps longer than the goal by as much as times vary.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import InvariantBroken
from baton.protocol.step import StepPlan
from baton.sim.scenario import Scenario

LEARNING_STEPS = 6
"""Steps with prompts beside decodes before the pace is checked."""
LEAST = 32
"""Least prompt tokens per step: prompts always get 16, and at times twice as many."""
SLOWDOWN = 3.0
"""Longest step relative to decoding alone, if decoding takes longer than the goal."""


class PaceWatch:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._mixed = 0
        self._decoding = 0
        "Maximum of sequences that decoded in one step."

    def planned(self, plan: StepPlan, position: Mapping[int, int], known: Mapping[int, int]) -> None:
        """Check a planned step. `position`, `known`: computed tokens before this step, and prompt tokens, by slot."""
        scenario, goal = self._scenario, self._scenario.decode_gap_seconds
        if goal is None or not scenario.token_seconds:
            return
        rows = zip(plan.run.slots, plan.run.counts, strict=True)
        chunks = [count for slot, count in rows if position[slot] < known[slot]]
        self._decoding = max(self._decoding, len(plan.run.slots) - len(chunks) + sum(plan.run.drafts))
        if not chunks or len(chunks) == len(plan.run.slots):
            return
        self._mixed += 1
        slowest = (scenario.step_seconds + scenario.token_seconds * self._decoding) * (1 + scenario.noise)
        slowest = max(
            [slowest, *(fault.seconds for fault in scenario.steps if fault.kind == "plod" and fault.step <= plan.step)]
        )
        allowed = max(LEAST, 2 * max(goal, SLOWDOWN * slowest) / scenario.token_seconds)
        if self._mixed > LEARNING_STEPS and sum(chunks) > allowed:
            raise InvariantBroken(
                f"step {plan.step} has {sum(chunks)} prompt tokens beside decodes, {allowed:.0f} keep it near {goal} s",
                invariant=30,
            )
