"""Time for the isolation of poisonous requests after healing. Poison is not healed: it belongs to its request.

Suspects are separated by losing further workers (core/engine/recovery.py), and each restart in a row waits longer. All requests
of the instance wait meanwhile, in production too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.errors import InvariantBroken
from baton.sim.instance import SimulatedInstance
from baton.sim.plans import PlanWatch
from baton.sim.scenario import Scenario


class _Healed(NamedTuple):
    """An instance at the time of healing."""

    instance: SimulatedInstance
    plans: PlanWatch
    deaths: dict[str, int]
    "Workers that each client's request had killed until then."


class Isolation:
    def __init__(self, scenario: Scenario, instances: Iterable[tuple[SimulatedInstance, PlanWatch]]) -> None:
        self._healed = [_Healed(instance, plans, dict(plans.deaths)) for instance, plans in instances]
        self._clients = {client.id: client for client in scenario.clients}
        self._culprits = sum(client.n for client in scenario.clients if client.poison_at is not None)
        backoff = scenario.of_instance(0).config().scheduler.restart_backoff_seconds_max  # the same for all
        self._restart_seconds = backoff + scenario.restart_seconds

    @property
    def seconds(self) -> float:
        """Longest time that restarts since healing may have taken at one instance. Instances isolate at the same time."""
        return self._restart_seconds * max(map(self._deaths, self._healed), default=0)

    def _deaths(self, healed: _Healed) -> int:
        """Workers that poison has killed since healing. 47: the culprits are found."""
        instance, plans, before = healed
        deaths = {client: count - before.get(client, 0) for client, count in plans.deaths.items()}
        for client, count in deaths.items():
            if count > ((instance.spec.slots - 1).bit_length() + 2) * self._clients[client].n * self._culprits:
                raise InvariantBroken(f"{instance.name}: {client} has killed {count} workers since healing", invariant=47)
        return sum(deaths.values())
