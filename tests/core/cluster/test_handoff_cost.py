"""Whether a prompt is handed over: by its length and by what either way costs."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.protocol.handoff import Reserve
from baton.protocol.instance import Heartbeat

from .harness import Room, request


def placed(policy, uncached, token_seconds, requests=1, **more):
    """A prefill and a decode instance: how many of the requests are handed over, one after the other?"""
    config = RouterConfig(handoff=policy, handoff_tokens_min=128, handoff_seconds_start=0.02, **more)
    room = Room("prefill", "decode", config=config, blocks=4000, slots=600)
    decode = room.instances[1]
    for number in range(requests):
        room.say(decode, Heartbeat(token_seconds=token_seconds, blocks_available=4000, slots_free=600))
        room.arrive(request(f"r{number}", prompt=(number,) * uncached, max_tokens=2))
        room.step(8)
        room.router._placement.handoff_seconds = 0.02  # as measured before
        assert room.router.idle
    return sum(isinstance(message, Reserve) for message in decode.heard)


@pytest.mark.parametrize(
    ("policy", "short", "cheap", "long"), [("auto", 0, 0, 1), ("always", 1, 1, 1), ("never", 0, 0, 0)], ids=str
)
def test_policy_length_and_cost(policy, short, cheap, long):
    cases = [(100, 0.0), (150, 0.0001), (400, 0.0001)]
    assert [placed(policy, uncached, seconds) for uncached, seconds in cases] == [short, cheap, long]


def test_a_hand_off_that_was_slow_once_is_tried_again():
    assert placed("auto", 150, 0.0001, requests=12, handoff_retry_interval=4) == 3


def test_prompts_are_counted_and_not_looks_at_them():
    """A prompt that waits is looked at again and again. That does not bring the next hand-off nearer."""
    config = RouterConfig(handoff_tokens_min=128, handoff_seconds_start=0.02, handoff_retry_interval=4, waiting_prompts_max=0)
    room = Room("prefill", "decode", config=config, blocks=4000, slots=1)
    decode = room.instances[1]
    decode.beat = lambda: Heartbeat(token_seconds=0.0001, blocks_available=4000, slots_free=1 - len(decode.assigned))
    room.say(decode, decode.beat())
    for number in range(3):
        room.arrive(request(f"r{number}", prompt=(number,) * 150, max_tokens=3))
    for number in range(20):
        room.arrive(request(f"short{number}", tokens=4))
        room.withdraw(f"short{number}")
        room.settle()
    room.run()
    assert not any(isinstance(message, Reserve) for message in decode.heard)
