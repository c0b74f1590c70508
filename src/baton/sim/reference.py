"""The expected behaviour of an instance, computed again: refusals and their reasons, order, ends.

Small and slow on purpose, and with its own numbers: it never reads the core's order, counters or deadlines.
"""

from __future__ import annotations

from heapq import heappop, heappush

from baton.core.engine.admission import new_bytes
from baton.core.events import Event, LossCause, Pause, Resume
from baton.errors import InvariantBroken
from baton.protocol.request import Refused, SamplingParams
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import QueueKey

HEALTHY_STEPS = 16
"""Number of absorbed steps after which losses in a row are counted anew. A separate number: that of the core may be wrong."""


class Reference:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._arrivals: dict[str, int] = {}
        self._arrived = 0
        self._open: dict[str, int] = {}
        "Accepted requests: number of sequences that have not ended."
        self._queued: dict[tuple[str, int], int] = {}
        "Sequences that were never admitted: their prompt tokens."
        self._queued_tokens = 0
        self._deadlines: list[tuple[float, str, int]] = []
        "Deadlines: time, id and arrival number. An id may be used again."
        self.now = 0.0
        "The latest time that the instance was given: its clock may go backwards."
        self.mode = "serving"
        self._drain_deadline: float | None = None
        self._resumed = False
        self._lives_lost = 0
        self._kills = 0
        self._restarts = 0
        self._unsure = False
        "Whether the last lost life of the worker was healthy is unknown."
        self._steps = 0

    # Refusals

    def refusal(self, client: Client, sampling: SamplingParams, worker_gone: bool) -> Refused | None:
        """The refusal that the client must get. The size of a plan is the core's own estimate: plans.py checks that no plan is
        larger."""
        scenario = self._scenario
        if worker_gone:
            return Refused("worker_gone")
        if self.mode != "serving":
            return Refused("draining" if self.mode == "draining" else "paused")
        if client.id in self._open:
            return Refused("duplicate_id")
        positions = len(client.prompt) + client.max_tokens - 1
        blocks = (positions + scenario.block_size - 1) // scenario.block_size
        if blocks > scenario.blocks:
            return Refused("never_fits", blocks, scenario.blocks)
        plan = new_bytes(len(client.prompt) + client.max_tokens, sampling)
        if plan > scenario.plan_bytes_max:
            return Refused("never_planned", plan, scenario.plan_bytes_max)
        requests, tokens = scenario.queue_requests_max, scenario.queue_tokens_max
        own = client.n * len(client.prompt)
        if client.n > requests or own > tokens:
            return Refused("never_queued", *((client.n, requests) if client.n > requests else (own, tokens)))
        if (waiting := len(self._queued) + client.n) > requests:
            return Refused("queue_full", waiting, requests)
        if (waiting := self._queued_tokens + own) > tokens:
            return Refused("queue_tokens_full", waiting, tokens)
        return None

    def answered(self, client: Client, expected: Refused | None, got: Refused | None) -> None:
        """22: the request is refused exactly when it must be, for the right reason and with the right numbers."""
        gone = expected is not None and got is not None and expected.reason == got.reason == "worker_gone"
        if expected != got and not gone:
            raise InvariantBroken(f"{client.id} should get {expected}, and got {got}", invariant=22)
        if got is not None:
            return
        self._arrived += 1
        self._arrivals[client.id] = self._arrived
        self._open[client.id] = client.n
        for index in range(client.n):
            self._queued[client.id, index] = len(client.prompt)
        self._queued_tokens += client.n * len(client.prompt)
        if client.timeout is not None:
            heappush(self._deadlines, (self.now + client.timeout, client.id, self._arrivals[client.id]))

    # Order

    def order(self, client: Client, index: int) -> QueueKey:
        """Key of a request's place in the queue. 34: by priority, then by arrival."""
        priority = client.priority if self._scenario.order == "priority" else 0
        return priority, self._arrivals[client.id] * 1000 + index

    def admitted(self, client: Client, index: int) -> None:
        self._queued_tokens -= self._queued.pop((client.id, index), 0)

    # Ends

    def ended(self, client: Client, index: int) -> None:
        self._queued_tokens -= self._queued.pop((client.id, index), 0)
        self._open[client.id] -= 1
        if not self._open[client.id]:
            del self._open[client.id]

    def may_time_out(self, client: Client) -> bool:
        mine = client.id, self._arrivals[client.id]
        return any((request, arrival) == mine and deadline <= self.now for deadline, request, arrival in self._deadlines)

    def may_be_drained(self) -> bool:
        return self._drain_deadline is not None and self._drain_deadline <= self.now

    def before_event(self, event: Event, now: float) -> None:
        self.now = max(self.now, now)
        self._resumed = isinstance(event, Resume)
        if isinstance(event, Pause) and self.mode != "paused" and event.drain_seconds_max is not None:
            self._drain_deadline = self.now + event.drain_seconds_max
        elif isinstance(event, Resume):
            self._drain_deadline = None

    def mode_changed(self, mode: str) -> None:
        self.mode = mode
        if mode == "paused":
            self._drain_deadline = None

    def after_event(self, worker_gone: bool) -> None:
        """22: a request ends at its deadline, and all end when there is no worker. 9: a resumed instance serves."""
        if worker_gone and self._open:
            raise InvariantBroken("the worker is given up, and requests are open", invariant=22)
        if self._resumed and self.mode != "serving":
            raise InvariantBroken(f"resumed, and it is {self.mode}", invariant=9)
        while self._deadlines and self._deadlines[0][0] <= self.now:
            deadline, request, arrival = heappop(self._deadlines)
            if request in self._open and self._arrivals[request] == arrival:
                raise InvariantBroken(f"{request} is open at {self.now:.3f}, its deadline was {deadline:.3f}", invariant=22)
        if self._open and self.may_be_drained():
            raise InvariantBroken("requests are open after the drain deadline", invariant=22)

    # The worker's life

    def steps_absorbed(self, count: int) -> None:
        self._steps += count

    def is_evidence(self, cause: LossCause) -> bool:
        """Whether a loss counts as a fault of the computation. Kills from outside may, from the sixth on (or the scenario's
        number). All are counted: a scenario is shorter than the minute in which they must occur."""
        self._kills += cause == "killed"
        return cause != "killed" or self._kills > self._scenario.worker_kills_max

    def worker_lost(self, evidence: bool, perhaps_absorbed: int) -> None:
        """Record a lost worker. `perhaps_absorbed`: steps of the same event before the loss was found. Their number is not
        visible."""
        if self._steps >= HEALTHY_STEPS:
            self._lives_lost = self._restarts = 0
        self._unsure = self._steps < HEALTHY_STEPS <= self._steps + perhaps_absorbed
        self._steps = 0
        self._lives_lost += evidence

    def slept(self) -> None:
        """The worker is stopped by order: its steps do not count for the next one, and no loss does."""
        if self._steps >= HEALTHY_STEPS:
            self._lives_lost = self._restarts = 0
        self._steps = 0

    def restarted(self, delay: float) -> None:
        """46: the worker restarts at once after the first loss, then 0.1 s later, doubled for each restart in a row, 10 s at
        most."""
        expected = min(0.1 * 2 ** (self._restarts - 1), 10.0) if self._restarts else 0.0
        if self._unsure and not delay:
            self._restarts = 0
        elif abs(delay - expected) > 1e-9:
            raise InvariantBroken(f"restart {self._restarts + 1} in a row waits {delay} s, not {expected}", invariant=46)
        self._restarts += 1

    def replaced(self) -> None:
        """Reset the count of losses: an operator replaced the worker."""
        self._lives_lost = self._restarts = self._steps = self._kills = 0

    def may_give_worker_up(self) -> bool:
        return self._lives_lost > self._scenario.worker_restarts_max
