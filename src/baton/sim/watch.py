"""State shared by all checks of a run: the requests, the rare states that were reached, the faults that happened."""

from __future__ import annotations

from baton.sim.excuses import FaultLog
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.timeline import Timeline


class Watch:
    def __init__(self, scenario: Scenario, timeline: Timeline) -> None:
        self.weights_known = scenario.weights_known
        self.requests = {client.id: SimulatedRequest(client, weights_known=self.weights_known) for client in scenario.clients}
        "The present request with each id."
        self.all_requests = list(self.requests.values())
        self.sometimes: dict[str, int] = {}
        "Rare states that were reached."
        self.faults = FaultLog()
        self._timeline = timeline

    def saw(self, what: str) -> None:
        self.sometimes[what] = self.sometimes.get(what, 0) + 1

    def add(self, request: SimulatedRequest) -> None:
        """Add a request that is not in the scenario. An earlier request with its id has been answered."""
        self.requests[request.client.id] = request
        self.all_requests.append(request)

    def happened(self, kind: str) -> None:
        """Record a fault that strikes now."""
        self.faults.add(self._timeline.now, kind)
