"""What all checks of a run share: the requests, and the rare states that were reached."""

from __future__ import annotations

from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest


class Watch:
    def __init__(self, scenario: Scenario) -> None:
        self.weights_known = scenario.weights_known
        self.requests = {client.id: SimulatedRequest(client, weights_known=self.weights_known) for client in scenario.clients}
        "By id: the present user of it."
        self.all_requests = list(self.requests.values())
        self.sometimes: dict[str, int] = {}
        "Rare states that were reached."
        self.disturbances: list[float] = []
        "When things went wrong: what an error must be earned by."
        self.losses: list[float] = []
        "Of those, what may cost a request its instance. One that drains, or is short of memory, gives it back or keeps it."

    def saw(self, what: str) -> None:
        self.sometimes[what] = self.sometimes.get(what, 0) + 1

    def add(self, request: SimulatedRequest) -> None:
        """A request that is not in the scenario. One that has its id has been answered."""
        self.requests[request.client.id] = request
        self.all_requests.append(request)

    def disturbed(self, now: float, *, loss: bool = True) -> None:
        self.disturbances.append(now)
        if loss:
            self.losses.append(now)

    def losses_since(self, then: float) -> int:
        return sum(at >= then for at in self.losses)

    def disturbances_since(self, then: float) -> int:
        return sum(at >= then for at in self.disturbances)
