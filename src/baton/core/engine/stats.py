"""Counters of an instance. The core counts, observe/ publishes."""

from __future__ import annotations

from typing import Literal, get_args

from baton.protocol.request import FinishReason, RefusalReason
from baton.protocol.step import StepResult

HeldBack = Literal["budget", "slots", "order", "plan", "blocks", "loading"]
"""Resource that the head of the queue was short of."""


class Stats:
    __slots__ = (
        "accepted_drafts",
        "adopted",
        "cached_tokens",
        "crash_ends",
        "draft_rows",
        "drafts",
        "ended",
        "folded_blocks",
        "handed_over",
        "held_back",
        "not_adopted",
        "not_kept",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "refused",
        "stale_results",
        "stale_rows",
        "steps",
        "worker_losses",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        "Prompt tokens found in the cache at a first admission."
        self.output_tokens = 0
        self.draft_rows = self.drafts = 0
        "Rows with draft tokens that the worker verified, and their draft tokens."
        self.accepted_drafts: list[int] = []
        "Accepted draft tokens, by their place in the draft."
        self.preemptions = 0
        self.folded_blocks = 0
        "Blocks that two sequences computed at the same time, now shared."
        self.stale_rows = 0
        "Rows of a sequence that has left its slot: ignored."
        self.stale_results = 0
        "Results that were repeated, or came from an earlier worker: ignored."
        self.worker_losses = 0
        self.crash_ends = 0
        "Sequences ended as poison (recovery.py)."
        self.handed_over = 0
        "Prompts that were computed for another instance (handoff/source.py)."
        self.not_kept = 0
        "Handed-over prompts whose blocks were gone when their release was requested."
        self.adopted = self.not_adopted = 0
        "Prompts that another instance computed: their blocks were used, or were void and the prompt was computed here."
        self.ended: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.refused: dict[RefusalReason, int] = dict.fromkeys(get_args(RefusalReason), 0)
        self.held_back: dict[HeldBack, int] = dict.fromkeys(get_args(HeldBack), 0)
        "Steps in which the head of the queue did not fit, by the resource that was short."

    def drafted(self, result: StepResult) -> None:
        """Count the drafts of a step."""
        for drafts, length in zip(result.drafted, result.lengths, strict=False):
            self.draft_rows += drafts > 0
            self.drafts += drafts
            self.accepted_drafts += [0] * (length - 1 - len(self.accepted_drafts))
            for place in range(length - 1):
                self.accepted_drafts[place] += 1
