"""Results of the search for an instance."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.core.cluster.cluster_instance import ClusterInstance


class Choice(NamedTuple):
    decoder: ClusterInstance
    prefill: ClusterInstance | None
    "Prefill instance. None: the decode instance computes the prompt itself."
    uncached: int
    "Tokens to compute, by the prefill instance or the decode instance."
    blocks: int
    "Blocks that the decode instance needs to begin."
    waits: bool
    "Whether the request must wait at the instance, because there is no room yet."


class ClusterShortage(Enum):
    """Reason why no instance is chosen for a request."""

    NOBODY = "nobody"
    "No usable instance could hold it."
    NEVER = "never"
    "No instance of the cluster could ever hold it."
    LOST = "lost"
    "No present instance could ever hold it, but one that was lost a moment ago could, and may come back."
    AVOIDED = "avoided"
    "The instances that could hold it may not be tried again yet."
    PREFILL = "prefill"
    "All prefill instances are busy."
    ROOM = "room"
    "No instance has room."


class Roles(NamedTuple):
    """Roles to choose a decode instance from, and whether prompts may be handed over. If one role is missing, the other does
    all."""

    tiers: tuple[tuple[str, ...], ...]
    "Roles of the decode instance, the preferred ones first."
    pairs: bool

    @property
    def all(self) -> tuple[str, ...]:
        return sum(self.tiers, ())


class Census(NamedTuple):
    """Number of instances that could get a request. Depends on the request's size and on the instances that it avoids, not on
    room."""

    roles: Roles
    settled: int
    "Settled decode instances that the request does not avoid: not lost repeatedly."
    inhibited: int
    "Inhibited decode instances that the request does not avoid: lost repeatedly."
    decodes: int
    "Number of instances with role decode: settled ones, or inhibited ones if none is settled."
    prefills: int
    "Prefill instances for a hand-off, busy or not."
    prefills_settled: bool
