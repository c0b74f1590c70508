"""What a router is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from baton.config.instance import QueueConfig, SchedulerConfig
from baton.config.values import Seconds
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

PlacementPolicy = Literal["prefix", "load", "two_choices", "round_robin"]
"""How an instance is chosen among those that can take a request (core/cluster/placement.py).

prefix        where the least is left to be computed: its prompt less what is cached there, plus what waits there already
load          the least loaded, in tokens
two_choices   the less loaded of two drawn ones: routers that know little of each other do not all choose the same
round_robin   in turn
"""

HandoffPolicy = Literal["auto", "always", "never"]

Count = Annotated[int, Range(1, 2**31 - 1)]
Many = Annotated[int, Range(0, 2**31 - 1)]

BEAT_SECONDS_MIN = 0.02
BEATS_MIN = 3

_SCHEDULER, _QUEUE = SchedulerConfig(), QueueConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """What a router lets in, how it chooses instances, and how long it waits for what."""

    policy: PlacementPolicy = "prefix"
    "How an instance is chosen."
    order: Literal["priority", "arrival"] = _SCHEDULER.order
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."

    queue_requests_max: Count = _QUEUE.requests_max
    "Sequences that wait for their first instance. Over it a request is turned away."
    queue_tokens_max: Count = _QUEUE.tokens_max
    "Prompt tokens of those sequences."
    requests_open_max: Count = 65_536
    "Requests that are owed something, waiting or not."
    queue_seconds_max: Seconds = 300.0
    "A request that no instance had room for in this time is turned away."
    no_instance_seconds: Seconds = 10.0
    "A request waits so long while there is no instance that works; then it is turned away, or broken off."

    beat_seconds: Seconds = 0.25
    "Instances say something at least this often."
    suspect_seconds: Seconds = 1.0
    "An instance that said nothing for so long gets no new requests."
    lapse_seconds: Seconds = 2.0
    "An instance that said nothing for so long is given up; its requests go on elsewhere."
    instances_max: Count = 1024
    "Instances at once. One more is refused."

    waiting_prompts_max: Many = 1
    "Prompts that an instance is sent beyond those that it can begin at once, so that it never waits for the router. A prefill \
instance is sent prompts worth two of its steps, where these are more."
    overdrawn_max: Count = 8
    "Requests that wait at one instance for room, whatever their priorities are."
    handoff: HandoffPolicy = "auto"
    "Whether prompts are handed over from prefill to decode instances. auto: where that is cheaper than computing them there."
    handoff_tokens_min: Many = 128
    "An uncached part shorter than this is computed where it is decoded."
    handoff_seconds_start: Seconds = 0.02
    "What a hand-off takes, before one was measured."
    handoff_retry_interval: Count = 32
    "One of so many prompts that are cheaper to compute at decode is handed over all the same, to measure what that takes now."
    migrations_max: Many = 3
    "Losses of its instance that a request survives. One more breaks it off: it may be what they die of."
    again_seconds: Seconds = 0.5
    "An instance that refused or lost a request is not tried again with it before that."

    preempted_seconds: Seconds = 10.0
    "An instance that preempted a request is the last choice for it for so long."

    reserve_seconds_max: Seconds = 2.0
    "Within this time a decode instance says whether it has room."
    lease_seconds: Seconds = 10.0
    "How long a decode instance keeps room without being told again."
    prefill_seconds_max: Seconds = 600.0
    "A prompt of which nothing new was computed for so long is computed elsewhere."
    handing_seconds_max: Seconds = 10.0
    "From the last computed block until decode goes on."
    silence_seconds_max: Seconds = 600.0
    "A request that got no token for so long is sent elsewhere."
    withdraw_seconds_max: Seconds = 2.0
    "Within this time an instance says how a withdrawn sequence ended. Then the router says it."

    prefix_keys_max: Count = 1_000_000
    "Keys of blocks that the router remembers for all instances together: what each was sent, and so probably has cached."
    prefix_blocks_max: Count = 8192
    "Blocks of one prompt that are looked up there."

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
