"""Copies to lower tiers are made and found again, and storage is asked: the checks of each copy (tiers_watch.py) would pass
without any.

Both are checks of a plain instance, after healing. `check_tier_outcomes` is for scenarios whose worker and cache service lose
nothing, and comes first; `RepeatedPrompt` is for all.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from baton.core.events import ForgetCache
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.sim.engine import SimulatedEngine
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.tiers_watch import KeyContents

BLOCKS = 2
"""Number of full blocks of the prompt that is repeated."""
ANSWER_TRIES = 8
"""Answers of storage until it counts as quick again: each lowers a rate by a fifth, from the longest answer that counts (0.2 s)
to the shortest wait (0.05 s)."""


def check_tier_outcomes(scenario: Scenario, requests: list[SimulatedRequest], machine: Instance, queries: int) -> None:
    """65: computed blocks are copied to the host, and storage is asked for prompts before they are computed."""
    lost = scenario.steps or scenario.cache_faults or any(nudge.kind not in ("evict", "preempt") for nudge in scenario.nudges)
    if lost or not scenario.host_blocks or scenario.bound:
        return
    least = machine.config.tiers.load_blocks_min
    served = [request.client for request in requests if any(request.delivered)]
    whole = {client.id: (len(client.prompt) - 1) // scenario.block_size for client in served}
    stats = machine.view.tier_stats
    copies = stats.stored + stats.fetched + stats.lost_stores + stats.skipped_stores
    if scenario.write == "through" and any(whole.values()) and not copies:
        raise InvariantBroken("blocks were computed, and none was copied to the host", invariant=65)
    asks = any(whole[client.id] >= least and client.prompt_logprobs is None for client in served)
    if scenario.storage and asks and not queries:
        raise InvariantBroken("prompts were computed, and storage was never asked for one", invariant=65)


class RepeatedPrompt:
    """74: one prompt comes again and again, alone, on an idle instance without faults. The device has dropped its blocks, and
    the host tier or storage has them: they are loaded, not computed.

    The only excuse to compute the prompt is a move that was measured as slower than computing. Of `load_again_after` moves that
    were not worth it one is made anyway, so a limited number of tries is enough. Blocks that the write policy did not copy are
    not expected.
    """

    def __init__(
        self, scenario: Scenario, engine: SimulatedEngine, weights: int, ask: Callable[[Client], SimulatedRequest]
    ) -> None:
        """`ask` submits a request and returns it when nothing is left to happen."""
        self._scenario = scenario
        self._engine = engine
        self._ask = ask
        self._asked = 0
        self._tries = (ANSWER_TRIES + 1) * engine.instance.config.tiers.load_again_after
        blocks = min(BLOCKS, scenario.bound or BLOCKS, scenario.host_blocks, scenario.blocks - 1)
        self._prompt = [1] * (blocks * scenario.block_size + 1)
        self._keys = list(KeyContents(scenario.block_size, []).chain("again", self._prompt, weights))[:blocks]

    def check(self) -> None:
        for _ in range(2):  # a selective write copies only blocks that were hit
            self._submit_prompt()
        self._is_loaded()
        if self._engine.cache is not None and self._engine.instance.view.circuits()["read"] == "closed":  # otherwise 68 applies
            self._is_fetched(self._engine.cache.storage)

    def _is_loaded(self) -> None:
        """Whether the prompt is loaded after the device drops its blocks: the host has them."""
        here = found = 0
        for _ in range(self._tries):
            self._forget(host=False)
            here = self._leading(self._engine.instance.view.host_index())
            found = self._submit_prompt()
            if found >= here * self._scenario.block_size:
                return
        raise InvariantBroken(f"the host tier has {here} blocks of a prompt, and {found} tokens are loaded", invariant=74)

    def _is_fetched(self, storage: Container[bytes]) -> None:
        """Whether the prompt is fetched after device and host drop its blocks: storage has them."""
        stats = self._engine.instance.view.tier_stats
        before = stats.fetched
        for _ in range(self._tries):
            self._forget(host=True)
            if not self._leading(storage):
                return
            self._submit_prompt()
            if stats.fetched > before:
                return
        raise InvariantBroken("storage has the blocks of a prompt, and none is fetched", invariant=74)

    def _forget(self, *, host: bool) -> None:
        self._engine.dispatch(ForgetCache(0, host=host))
        if host:
            self._engine.tiers.cleared()

    def _leading(self, keys: Container[bytes]) -> int:
        """Number of the prompt's leading blocks that are among these keys."""
        return next((place for place, key in enumerate(self._keys) if key not in keys), len(self._keys))

    def _submit_prompt(self) -> int:
        """Submit the prompt. Returns how many of its tokens were found in a cache."""
        self._asked += 1
        name = f"again{self._asked}"
        return self._ask(Client(name, 0.0, list(self._prompt), 1, salt="again")).hit[0] or 0
