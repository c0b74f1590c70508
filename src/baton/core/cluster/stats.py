"""Counters of a router, since it began. They never fall."""

from __future__ import annotations

from collections import Counter

from baton.core.cluster.handoff_table import OUTCOMES


class RouterStats:
    __slots__ = (
        "arrived",
        "broken",
        "broken_off",
        "handoff_ends",
        "handoffs",
        "instances_lost",
        "instances_refused",
        "late_facts",
        "left",
        "losses",
        "moved",
        "paths_given_up",
        "refused",
        "retries",
        "stale_rows",
        "turned_away",
        "whole",
    )

    def __init__(self) -> None:
        self.arrived = 0
        self.turned_away: Counter[str] = Counter()
        "By RefusalReason."
        self.broken_off: Counter[str] = Counter()
        "By EndError."
        self.whole = 0
        "Requests sent to one instance."
        self.handoffs = 0
        "Prompts that were computed by one instance and came to another."
        self.handoff_ends: Counter[str] = Counter(dict.fromkeys((*OUTCOMES.values(), "not_copied"), 0))
        "Hand-offs that were begun, by what became of them."
        self.paths_given_up = 0
        "Times that an instance was found unable to copy from another (core/cluster/paths.py)."
        self.retries = 0
        "Attempts after the first one."
        self.refused: Counter[str] = Counter()
        "By RefusalReason, said by instances."
        self.broken = 0
        "Attempts in which an instance did not do what it should."
        self.moved = 0
        "Of those: the instance's worker stood still, and another one has gone on."
        self.left = 0
        "Attempts that an instance gave back because it was told to stop."
        self.instances_lost = 0
        self.losses: Counter[str] = Counter(dict.fromkeys(("session_over", "left", "silent", "joined_again"), 0))
        "Of those, by how: its session ended, it had been told to stop, it said nothing, it came back before it was missed."
        self.instances_refused = 0
        self.late_facts = 0
        "Messages that mean nothing any more."
        self.stale_rows = 0
        "Tokens and ends that are not the next ones."
