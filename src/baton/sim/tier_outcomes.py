"""Copies to lower tiers are made, and storage is asked: the checks of each copy (tiers_watch.py) would pass without any.

Checked at rest, on a plain instance whose worker and cache service lose nothing.
"""

from __future__ import annotations

from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest


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
