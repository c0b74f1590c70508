"""Counters of a router since its start. They never decrease."""

from __future__ import annotations

from collections import Counter

from baton.core.cluster.handoff_table import OUTCOMES


class RouterStats:
    __slots__ = (
        "arrived",
        "broken",
        "broken_off",
        "digest_bytes",
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
        "Rejected requests, by RefusalReason."
        self.broken_off: Counter[str] = Counter()
        "Failed requests, by EndError."
        self.digest_bytes = 0
        "Bytes of keys that instances have published (protocol/instance.py: CachedKeys)."
        self.whole = 0
        "Requests sent to one instance."
        self.handoffs = 0
        "Prompts computed by one instance and copied to another."
        self.handoff_ends: Counter[str] = Counter(dict.fromkeys((*OUTCOMES.values(), "not_copied"), 0))
        "Hand-offs that began, by outcome."
        self.paths_given_up = 0
        "Times that an instance was found unable to copy from another (core/cluster/paths.py)."
        self.retries = 0
        "Attempts after the first one."
        self.refused: Counter[str] = Counter()
        "Refusals by instances, by RefusalReason."
        self.broken = 0
        "Attempts that broke because an instance failed or was late."
        self.moved = 0
        "Broken attempts whose instance had a stalled worker."
        self.left = 0
        "Attempts that an instance returned because it was stopped."
        self.instances_lost = 0
        self.losses: Counter[str] = Counter(dict.fromkeys(("session_over", "left", "silent", "joined_again", "digests"), 0))
        """Lost instances by cause: session ended, stopped by order, silent, back before the loss was noticed, or sending keys
        of cached blocks that it may not send."""
        self.instances_refused = 0
        self.late_facts = 0
        "Messages that no longer apply."
        self.stale_rows = 0
        "Tokens and ends that are not the next ones."
