"""The fast search chooses the same instance as a sort over all of them, choice by choice: all policies, roles and sizes."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster import search
from baton.core.cluster.events import RouterTick
from baton.core.kv.marks import KEY_BYTES
from baton.protocol.control import InstanceStats
from baton.protocol.instance import CachedKeys, Heartbeat
from baton.protocol.versions import CACHED_KEYS
from baton.sim.cluster.naive_placement import check_placement

from .harness import NO_ROOM, Room, Scripted, hello, request

POLICIES = ("prefix", "load")
SHAPES = {
    "mixed": ("mixed",) * 7,
    "pairs": ("prefill",) * 3 + ("decode",) * 5,
    "all roles": ("prefill", "prefill", "decode", "decode", "decode", "mixed", "mixed"),
    "one kind": ("prefill",) * 4,
}


def digest(room, rng):
    """Some keys of requests, in no order, with parents or without: an instance may report anything."""
    keys = [key for routed in room.router.coordinator.routed_requests.values() for _, key in routed.marks]
    added, removed = [b"".join(key.to_bytes(KEY_BYTES) for key in keys if rng.random() < 0.4) for _ in range(2)]
    return CachedKeys(rng.random() < 0.2, added, removed)


def random_life(room, rng, names, steps):
    """Requests with shared prefixes come, and instances report, compute, refuse, fail, pause, leave and come back."""
    for number in range(steps):
        instance = rng.choice(list(room.live.values())) if room.live else None
        roll = rng.random()
        if roll < 0.4 or instance is None:
            family, tokens = rng.randrange(4), rng.choice((3, 17, 40, 70, 130))
            prompt = tuple(family if place < tokens * 0.7 else rng.randrange(3) for place in range(tokens))
            more = {"max_tokens": rng.choice((1, 2, 6)), "n": rng.choice((1, 1, 3)), "priority": rng.choice((0, 0, 5, -5))}
            room.arrive(request(f"r{number}", prompt=prompt, **more))
        elif roll < 0.6:
            blocks = rng.choice((0, 3, 20, instance.hello.ready.blocks))
            slots, waiting = rng.choice((0, 1, 8)), rng.choice((0, 0, 50, 300))
            cost = rng.choice((0.0, 0.0001, 0.01))
            beat = Heartbeat(blocks_available=blocks, slots_free=slots, waiting_tokens=waiting, token_seconds=cost)
            fault = "broken" if rng.random() < 0.05 else ""
            preempted = tuple(leg for leg in instance.assigned if rng.random() < 0.2)
            held = rng.choice(((), ((5, 30),), ((5, 10), (0, 20)), ((-5, 60),)))
            room.say(instance, replace(beat, fault=fault, preempted=preempted, held=held))
        elif roll < 0.8:
            room.step()
        elif roll < 0.84:
            instance.refuse = NO_ROOM if instance.refuse is None else None
        elif roll < 0.88 and instance.assigned:
            instance.fail(rng.choice(list(instance.assigned)))
        elif roll < 0.9:
            room.kill(instance)
        elif roll < 0.92:
            if instance.hello.capabilities:
                room.say(instance, digest(room, rng))
        elif roll < 0.95:
            missing = [name for name in names if name not in {each.hello.name for each in room.live.values()}]
            if missing:
                room.join(Scripted(names[rng.choice(missing)]))
        elif roll < 0.96:
            room.say(instance, InstanceStats(mode=rng.choice(("serving", "serving", "serving", "paused"))))
        else:
            room.now += rng.choice((0.02, 0.3, 0.6, 1.2))
            for each in list(room.live.values()):
                if rng.random() < 0.8:
                    room.say(each, each.beat())
            room.dispatch(RouterTick())
        room.settle()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_choice_as_a_sort(policy, shape, seed, monkeypatch):
    rng = Random(f"{policy} {shape} {seed}")
    monkeypatch.setattr(search, "FEW", seed % 3)  # so that a few instances are as many
    config = RouterConfig(
        policy=policy,
        handoff_tokens_min=rng.choice((0, 8, 32)),
        handoff_retry_interval=rng.choice((2, 32)),
        waiting_prompts_max=rng.choice((0, 1, 3)),
        overdrawn_max=rng.choice((1, 3, 8)),
        handoff_room_seconds=rng.choice((0.1, 0.5, 5.0)),
        prefix_keys_max=rng.choice((30, 400, 100_000)),
        migrations_max=100,
        again_seconds=0.3,
        preempted_seconds=1.0,
    )
    room = Room(config=config)
    names = {}
    for number, role in enumerate(SHAPES[shape]):
        made = hello(f"i{number}", role, blocks=rng.choice((20, 40, 60)), slots=rng.choice((1, 4, 16)))
        names[made.name] = replace(
            made,
            step_tokens=rng.choice((0, 16, 64)),
            peers=() if rng.random() < 0.1 else made.peers,
            capabilities=(CACHED_KEYS,) if rng.random() < 0.7 else (),
        )
        room.join(Scripted(names[made.name]))
    placement = check_placement(room.router, config)
    for instance in room.instances:
        if rng.random() < 0.3:
            instance.unreadable = tuple(f"peer-i{number}" for number in range(8) if rng.random() < 0.6)
    random_life(room, rng, names, 160)
    assert placement.compared > 20
