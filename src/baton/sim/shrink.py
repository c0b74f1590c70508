"""A failing scenario becomes a small one that fails the same invariant.

Works on the scenario, not on the seed. Passes, repeated until none of them helps: take faults out, take clients out, lower
numbers towards their minimum, switch features off. A candidate counts if the *same* invariant fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec

from baton.sim.run import run
from baton.sim.scenario import SCHEDULER, Client, Cluster, Scenario

TRIALS_MAX = 6_000

Progress = Callable[[str], None]


def copy_of(scenario: Scenario) -> Scenario:
    return msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario)


class Shrinker:
    def __init__(self, scenario: Scenario, invariant: int, progress: Progress | None) -> None:
        self.best = copy_of(scenario)
        self.invariant = invariant
        self.trials = 0
        self._progress = progress

    def run(self) -> Scenario:
        if not self._fails(self.best):
            raise ValueError(f"the scenario does not fail invariant {self.invariant}")
        before = None
        while before != (before := msgspec.json.encode(self.best)) and self.trials < TRIALS_MAX:
            for name in ("steps", "nudges", "cache_faults"):
                self._thin(lambda s, n=name: getattr(s, n))  # type: ignore[misc]
            if self.best.cluster is not None:
                self._simplify_cluster()
            self._thin(lambda s: s.clients)
            self._simplify_clients()
            self._simplify_instance()
            self._focus()
            if self._progress is not None:
                self._progress(f"{len(self.best.clients)} requests, {self.best.faults} faults after {self.trials} trials")
        self.best.fails = self.invariant
        return self.best

    def _fails(self, candidate: Scenario) -> bool:
        self.trials += 1
        try:
            return run(candidate).invariant == self.invariant
        except Exception:  # a candidate must be a legal configuration
            return False

    def _offer(self, change: Callable[[Scenario], None]) -> bool:
        """Keep the change if the scenario still fails the same way."""
        if self.trials >= TRIALS_MAX:
            return False
        candidate = copy_of(self.best)
        change(candidate)
        if candidate == self.best or not self._fails(candidate):
            return False
        self.best = candidate
        return True

    def _thin(self, entries: Callable[[Scenario], list[Any]]) -> None:
        """Remove entries by delta debugging: halves, then quarters, ... then single entries."""
        size = len(entries(self.best))
        while size := size // 2 if size > 1 else 0 if size == 0 else 1:
            place = 0
            while place < len(entries(self.best)):
                if not self._offer(lambda s, at=place, n=size: _cut(entries(s), at, n)):  # type: ignore[misc]
                    place += size
            if size == 1:
                return

    def _simplify_clients(self) -> None:
        for place in range(len(self.best.clients)):
            for field, value in _simpler_client(self.best.clients[place]):
                self._offer(lambda s, at=place, f=field, v=value: setattr(s.clients[at], f, v))  # type: ignore[misc]
            self._lower(lambda s, at=place: s.clients[at], "max_tokens", 1)  # type: ignore[misc]
            self._shorten_prompt(place)

    def _shorten_prompt(self, place: int) -> None:
        size = len(self.best.clients[place].prompt)
        while size := size // 2:
            while len(self.best.clients[place].prompt) > size:
                if not self._offer(lambda s, n=size: _cut(s.clients[place].prompt, len(s.clients[place].prompt) - n, n)):  # type: ignore[misc]
                    break

    def _simplify_instance(self) -> None:
        for field, value in _SIMPLER_INSTANCE:
            self._offer(lambda s, f=field, v=value: setattr(s, f, v))  # type: ignore[misc]
        sizes = ("blocks", "slots", "tokens_per_step", "block_size") if self.best.cluster is None else ("block_size",)
        for field in sizes:
            self._lower(lambda s: s, field, 1)
        for place in range(len(self.best.steps)):
            self._offer(lambda s, at=place: setattr(s.steps[at], "every", True))  # type: ignore[misc]
            self._lower(lambda s, at=place: s.steps[at], "step", 1)  # type: ignore[misc]
        for place in range(len(self.best.nudges)):
            self._offer(lambda s, at=place: setattr(s.nudges[at], "at", 0.0))  # type: ignore[misc]

    def _simplify_cluster(self) -> None:
        """Simplify the cluster: faults, instances, abilities of the network and the instances, sizes."""
        self._thin(lambda s: _cluster(s).faults)
        self._thin(lambda s: _cluster(s).instances)
        for field, value in _SIMPLER_CLUSTER:
            self._offer(lambda s, f=field, v=value: setattr(_cluster(s), f, v))  # type: ignore[misc]
        for place in range(len(_cluster(self.best).instances)):
            self._thin(lambda s, at=place: _cluster(s).instances[at].steps)  # type: ignore[misc]
            self._thin(lambda s, at=place: _cluster(s).instances[at].cache_faults)  # type: ignore[misc]
            for field, value in (("chunk_tokens_max", None), ("host_blocks", 0), ("speed", 1.0)):
                self._offer(lambda s, at=place, f=field, v=value: setattr(_cluster(s).instances[at], f, v))  # type: ignore[misc]
            for field in ("blocks", "slots", "tokens_per_step"):
                self._lower(lambda s, at=place: _cluster(s).instances[at], field, 1)  # type: ignore[misc]
        for place in range(len(_cluster(self.best).faults)):
            self._lower(lambda s, at=place: _cluster(s).faults[at], "nth", 1)  # type: ignore[misc]

    def _focus(self) -> None:
        """Try each client with one step fault, at a new step: a fault counts steps, so it misses without earlier clients."""
        clients, faults = len(self.best.clients), len(self.best.steps)
        for client, fault in product(range(clients), range(min(faults, 3))) if clients > 1 else ():
            for step in range(1, 25):
                if self._offer(lambda s, c=client, f=fault, n=step: _alone(s, c, f, n)):  # type: ignore[misc]
                    return

    def _lower(self, owner: Callable[[Scenario], Any], field: str, least: int) -> None:
        """Lower a number to the smallest that still fails, by steps that halve."""
        step = getattr(owner(self.best), field) - least
        while step > 0:
            value = getattr(owner(self.best), field) - step
            if value < least or not self._offer(lambda s, v=value: setattr(owner(s), field, v)):  # type: ignore[misc]
                step //= 2


_SIMPLER_INSTANCE: tuple[tuple[str, Any], ...] = (
    ("steps_in_flight", 1),
    ("chunk_tokens_max", None),
    ("prefill_tokens_beside_decodes", None),
    ("prompts_at_once", 4),
    ("decode_gap_seconds", None),
    ("new_bytes_max", SCHEDULER.new_bytes_max),
    ("plan_bytes_max", SCHEDULER.plan_bytes_max),
    ("ranks", 1),
    ("ranks", 2),
    ("drafts_max", 0),
    ("drafts_max", 1),
    ("order", "priority"),
    ("eviction", "lru"),
    ("prefix_caching", True),
    ("pool_kept", False),
    ("noise", 0.0),
    ("reserve_start", 0.0),
    ("reserve_learning", 0.0),
    ("queue_requests_max", 10_000),
    ("queue_tokens_max", 1_000_000),
    ("worker_restarts_max", 5),
    ("worker_kills_max", 5),
    ("poison_unseen", False),
    ("preempted", "drop"),
    ("storage_tokens", False),
    ("storage", False),
    ("write", "through"),
    ("host_blocks", 0),
)


_SIMPLER_CLUSTER: tuple[tuple[str, Any], ...] = (
    ("routers", 1),
    ("skew", False),
    ("remote", False),
    ("jitter", 0.0),
    ("delay", 0.001),
    ("policy", "prefix"),
    ("handoff_tokens_min", 0),
    ("waiting_prompts_max", 1),
    ("migrations_max", 3),
    ("router_queue_max", 1024),
    ("silence_seconds_max", 600.0),
    ("prefill_seconds_max", 600.0),
    ("queue_seconds_max", 300.0),
    ("overdrawn_max", 8),
    ("handoff_room_seconds", 5.0),
    ("handoff_retry_interval", 32),
    ("prefix_keys_max", 1_000_000),
    ("lease_seconds", 10.0),
    ("handing_seconds_max", 10.0),
)


def _cluster(scenario: Scenario) -> Cluster:
    assert scenario.cluster is not None
    return scenario.cluster


def _simpler_client(client: Client) -> Iterator[tuple[str, Any]]:
    for field in ("abort_at", "abort_in", "again_at", "stop_string_at", "stop_last_at", "poison_at", "nan_at", "timeout"):
        if getattr(client, field) is not None:
            yield field, None
    yield from (("n", fewer) for fewer in (1, 2) if fewer < client.n)
    yield from (("drafts_max", None), ("priority", 0), ("min_tokens", 0), ("stop", []), ("salt", ""), ("at", 0.0), ("seed", 0))


def _alone(scenario: Scenario, client: int, fault: int, step: int) -> None:
    scenario.clients, scenario.steps = [scenario.clients[client]], [scenario.steps[fault]]
    scenario.steps[0].step = step


def _cut(items: list[Any], place: int, count: int) -> None:
    del items[place : place + count]


def shrink(scenario: Scenario, invariant: int, progress: Progress | None = None) -> Scenario:
    return Shrinker(scenario, invariant, progress).run()
