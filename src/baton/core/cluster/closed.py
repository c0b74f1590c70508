"""Instances closed for the rest of a placement pass, because a request that is ahead waits for room there.

No request overtakes another for the room that it waits for. Room that the waiting request could not use stays open for those
behind it: on an instance that is too small for it or that it avoids, or of a role that it cannot have.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.cluster.cluster_instance import ClusterInstance

NEVER_CLOSED = 2**62


class Closed:
    __slots__ = ("_decoders", "_others", "_prefills")

    def __init__(self) -> None:
        self._decoders: dict[str, int] = {}
        "Capacity in tokens from which instances are closed, by role."
        self._prefills: dict[tuple[str, ...], int] = {}
        "Capacity from which prefill instances are closed, except those with these names."
        self._others: dict[tuple[str, ...], dict[str, int]] = {}
        "Capacity from which decode instances are closed, except those with these names."

    def close(self, roles: Iterable[str], tokens: int, but: tuple[str, ...] = ()) -> None:
        decoders = self._others.setdefault(but, {}) if but else self._decoders
        for role in roles:
            decoders[role] = min(tokens, decoders.get(role, NEVER_CLOSED))

    def close_prefills(self, tokens: int, but: tuple[str, ...] = ()) -> None:
        self._prefills[but] = min(tokens, self._prefills.get(but, NEVER_CLOSED))

    def is_closed(self, instance: ClusterInstance) -> bool:
        role, capacity = instance.hello.role, instance.capacity
        if self._decoders.get(role, NEVER_CLOSED) <= capacity:
            return True
        if not self._others:
            return False
        return any(
            decoders.get(role, NEVER_CLOSED) <= capacity and instance.name not in names
            for names, decoders in self._others.items()
        )

    def is_closed_prefill(self, instance: ClusterInstance) -> bool:
        if not self._prefills:
            return False
        return any(tokens <= instance.capacity and instance.name not in names for names, tokens in self._prefills.items())

    def closes_all(self, role: str, smallest: int | None) -> bool:
        """Whether every instance of that role is closed. `smallest`: the smallest capacity. None: the role has no instances."""
        return smallest is None or self._decoders.get(role, NEVER_CLOSED) <= smallest
