"""Rare states of a cluster. Each must be reached, or the generator has gone blind to it (sim/campaign.py)."""

from __future__ import annotations

CLUSTER_SOMETIMES: tuple[str, ...] = (
    # Hand-offs
    *(f"a hand-off at H{stage}" for stage in range(10)),
    "a chunk was offered",
    "a whole prompt was offered",
    "what was offered could not be kept",
    "blocks were pulled",
    "a pull fell short",
    "a prompt was handed over",
    "a part of a block was handed over",
    "adopted without a release",
    "a release was denied",
    "a lease had lapsed",
    "a hand-off was tried again",
    # Faults at each stage
    *(f"{party} struck at H{stage}" for party in ("prefill", "decode") for stage in range(1, 10)),
    *(f"router struck at H{stage}" for stage in range(10)),
    *(f"a client left at H{stage}" for stage in range(10)),
    # Sessions
    "a session was cut",
    "a path stalled one way",
    "a path stalled both ways",
    "a router lapsed",
    "an instance lapsed",
    "a message of an earlier session reached a node",
    "a message of an earlier session reached a router",
    "an instance was back before its earlier session was over",
    # Lives
    "an engine was killed",
    "an engine froze",
    "an instance drained",
    "no instance was left",
    "a router was killed",
    "a router froze",
    "no router was there",
    "a stream broke with its router",
    "the worker hung",
    "the cache service died",
    "the cache service hung",
    # Requests
    "a replay",
    "a replay with tokens",
    "an instance refused: no_room",
    "an instance refused: draining",
    "turned away: queue_full",
    "turned away: never_fits",
    "turned away: worker_gone",
    "a request was broken off",
    "a request timed out",
    "a client left",
    "a stop string ended one sequence",
    "a stop string after a replay",
    "one row failed, alone",
    "a poisonous request was given up",
    "a log-probability was told",
    "a prompt's log-probabilities were told",
    # Tiers and workers, as on a single node
    "blocks were loaded from the host",
    "blocks were fetched from storage",
)
