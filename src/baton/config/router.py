"""Settings of a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from baton.config.instance import QueueConfig, SchedulerConfig
from baton.config.values import Seconds
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

PlacementPolicy = Literal["prefix", "load"]
"""Policies for the placement of a request among the instances with room (core/cluster/placement.py).

prefix   the least left to compute: uncached prompt tokens plus waiting work
load     the least loaded, in tokens
"""

HandoffPolicy = Literal["auto", "always", "never"]

Count = Annotated[int, Range(1, 2**31 - 1)]
Many = Annotated[int, Range(0, 2**31 - 1)]

BEAT_SECONDS_MIN = 0.02
BEATS_MIN = 3

_SCHEDULER, _QUEUE = SchedulerConfig(), QueueConfig()


@dataclass(frozen=True, kw_only=True)
class HandoffOptions:
    """Options of `baton router` and `baton up` that the router takes as they are."""

    handoff: HandoffPolicy = "auto"
    """Whether prompts go from prefill to decode instances. auto: where that is cheaper than computing them there, as
    measured. always. never: each instance computes the prompts that it decodes."""
    handoff_tokens_min: Many = 128
    "A prompt with fewer uncached tokens than this is computed by the instance that decodes it, without a hand-off."
    migrations_max: Annotated[int, Range(0, 1_000_000)] = 3
    "Losses of its instance that a request survives. After one more it ends with an error."


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig(HandoffOptions):
    """Limits, placement and timeouts of a router."""

    policy: PlacementPolicy = "prefix"
    "Placement policy."
    order: Literal["priority", "arrival"] = _SCHEDULER.order
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."

    queue_requests_max: Count = _QUEUE.requests_max
    "Maximum of sequences that wait for their first instance. Beyond it a request is refused."
    queue_tokens_max: Count = _QUEUE.tokens_max
    "Maximum of prompt tokens that wait for their first instance. Beyond it a request is refused."
    requests_open_max: Count = 65_536
    "Maximum of open requests, waiting or not."
    queue_seconds_max: Seconds = 300.0
    "Seconds without an instance after which a request is refused."
    no_instance_seconds: Seconds = 10.0
    "Seconds that a request waits without any working instance; then it is refused, or failed."

    beat_seconds: Seconds = 0.25
    "Interval of heartbeats in seconds: instances send at least this often."
    suspect_seconds: Seconds = 1.0
    "Seconds of silence after which an instance gets no new requests."
    lapse_seconds: Seconds = 2.0
    "Seconds of silence after which an instance is lost; its requests continue at other instances."
    instances_max: Count = 1024
    "Maximum of instances. Another one is refused."

    waiting_prompts_max: Many = 1
    """Number of prompts sent to an instance beyond those that it can begin at once, so that it never waits for the router. A
    prefill instance gets prompts worth two of its steps, if these are more."""
    overdrawn_max: Count = 8
    "Maximum of requests that wait at one instance for room, regardless of priority."
    handoff_seconds_start: Seconds = 0.02
    "Estimated seconds of a hand-off, before one is measured."
    handoff_retry_interval: Count = 32
    "Number of prompts that are cheaper to compute at decode, of which one is handed over anyway, to measure its cost."
    again_seconds: Seconds = 0.5
    "Seconds before an instance that refused or lost a request is tried again with it."

    handoff_room_seconds: Seconds = 5.0
    """Seconds after which a hand-off without a decode instance with room is sent whole to one that other routers use too. It
    waits there, and that instance computes its prompt."""
    preempted_seconds: Seconds = 10.0
    "Seconds for which an instance that preempted a request is its last choice."

    reserve_seconds_max: Seconds = 2.0
    "Seconds in which a decode instance must reserve room."
    lease_seconds: Seconds = 10.0
    "Seconds of a reservation's lease on a decode instance, if it is not renewed."
    prefill_seconds_max: Seconds = 600.0
    "Seconds without progress after which a prompt is computed at another instance."
    handing_seconds_max: Seconds = 10.0
    "Maximum of seconds from the last computed block until decode continues."
    silence_seconds_max: Seconds = 600.0
    "Seconds without a token after which a request is sent to another instance."
    withdraw_seconds_max: Seconds = 2.0
    "Seconds in which an instance must report the end of a withdrawn sequence. Then the router ends it."

    prefix_keys_max: Count = 4_200_000
    """Entries of the index of cached blocks, for all instances together. Each instance has an equal share. 1,000 instances of
    4,096 blocks publish at most 4,096 keys each: one per block, where prompts have one or two blocks (core/kv/marks.py)."""
    prefix_blocks_max: Count = 8192
    "Maximum of blocks of one prompt that are looked up in the index of cached blocks."

    def __post_init__(self) -> None:
        check_values(self)
        if self.suspect_seconds >= self.lapse_seconds:
            raise InvalidConfig("suspect_seconds must be less than lapse_seconds")
        if self.beat_seconds < BEAT_SECONDS_MIN:
            raise InvalidConfig(f"beat_seconds must be at least {BEAT_SECONDS_MIN:g}: instances send no more heartbeats")
        if self.suspect_seconds < 0.999 * BEATS_MIN * self.beat_seconds:
            raise InvalidConfig(
                f"suspect_seconds must be at least {BEATS_MIN} times beat_seconds: one heartbeat that is late is no silence"
            )
