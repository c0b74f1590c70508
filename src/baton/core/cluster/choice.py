"""What a look for an instance can result in."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.core.cluster.cluster_instance import ClusterInstance


class Choice(NamedTuple):
    decoder: ClusterInstance
    prefill: ClusterInstance | None
    "None: decode instance does all of it."
    uncached: int
    "Tokens to compute, by prefill or by decode instance."
    blocks: int
    "That decode instance needs to begin."
    waits: bool
    "There is no room yet."


class ClusterShortage(Enum):
    """Why a request is placed nowhere."""

    NOBODY = "nobody"
    "No instance works that could hold it."
    NEVER = "never"
    "None of those that are here could ever hold it."
    LOST = "lost"
    "Likewise, but one that could was here a moment ago, and may come back."
    AVOIDED = "avoided"
    "Those that could have it are not to be tried again at once."
    PREFILL = "prefill"
    "All prefill instances have enough to do."
    ROOM = "room"
    "No instance has room."


class Roles(NamedTuple):
    """Whom to choose a decode instance from, and whether prompts may be handed over. Where one kind is missing, the other does
    all."""

    tiers: tuple[tuple[str, ...], ...]
    "Roles, the preferred ones first."
    pairs: bool

    @property
    def all(self) -> tuple[str, ...]:
        return sum(self.tiers, ())


class Census(NamedTuple):
    """How many instances a request could have. It depends on the request's size and on what it avoids, not on room."""

    roles: Roles
    settled: int
    "Decode instances that it does not avoid, and that are not lost again and again."
    inhibited: int
    "Decode instances that it does not avoid, and that are."
    decodes: int
    "Decode instances among the better kind of those."
    prefills: int
    "Prefill instances that it may be handed over from, busy or not."
    prefills_settled: bool
