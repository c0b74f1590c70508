"""Lower tiers in the simulator: a storage that stalls, content that is checked, states that are reached."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.core.effects import RunStep
from baton.core.events import StorageAnswered
from baton.errors import InvariantBroken
from baton.protocol.moves import BlockMove, StorageAnswer, StorageQuery, pack_tokens
from baton.sim.scenario import CacheFault, Client, Scenario
from baton.sim.world import PlainWorld

STALL = 10.0
SLOW = "r3"
"""The request whose prompt storage is slow about."""


def scenario() -> Scenario:
    """Eight requests with prompts of their own. A step takes as long whatever is in it, so that only waiting can show."""
    clients = [Client(f"r{n}", 0.013 * n, [n + 1] * 9 + [n], 30) for n in range(8)]
    return Scenario(
        seed=1, blocks=200, block_size=2, slots=8, tokens_per_step=64, clients=clients, host_blocks=64, storage=True,
        noise=0.0, token_seconds=0.0,
    )  # fmt: skip


class Run:
    """One run, with what was planned and when each token came."""

    def __init__(self, made: Scenario, stalled: Callable[[StorageQuery], bool]) -> None:
        self.world = world = PlainWorld(made)
        self.plans: list[object] = []
        self.times: dict[str, list[float]] = {}
        self.stalls = 0
        cache, watch = world.engine.cache, world.watch
        assert cache is not None
        performs, emitted = watch.performs, world.clients.delivered

        def query(asked: StorageQuery, _: object) -> None:
            stalls = stalled(asked)
            self.stalls += stalls
            found = next((place for place, key in enumerate(asked.keys) if key not in cache.storage), len(asked.keys))
            answer = StorageAnswered(StorageAnswer(asked.id, found, None))
            cache.later(STALL if stalls else 0.0, lambda: world.instance._receive(answer))

        def plan(effect: object) -> None:
            if isinstance(effect, RunStep):
                self.plans.append(effect.plan)
            performs(effect)

        def told(emit: object) -> None:
            for request, *_ in emit.tokens:
                self.times.setdefault(request, []).append(world.timeline.now)
            emitted(emit)

        cache._query, watch.performs, world.clients.delivered = query, plan, told
        outcome = world.run()
        assert outcome.invariant is None, outcome.violation

    def others(self) -> dict[str, list[float]]:
        return {request: times for request, times in self.times.items() if request != SLOW and request.startswith("r")}


def of_the_slow_one(made: Scenario) -> Callable[[StorageQuery], bool]:
    keys = PlainWorld(made).engine.tiers.contents.chain("", next(c.prompt for c in made.clients if c.id == SLOW))
    return lambda asked: any(key in keys for key in asked.keys)


def test_a_stall_of_storage_for_one_request_leaves_the_others_tokens_at_their_times():
    prompt, stalled = Run(scenario(), lambda asked: False), Run(scenario(), of_the_slow_one(scenario()))
    assert stalled.stalls == 1
    assert not prompt.stalls
    assert stalled.others() == prompt.others()
    assert len(stalled.others()) == 7
    assert all(len(times) == 30 for times in stalled.others().values())
    assert stalled.times[SLOW][0] > prompt.times[SLOW][0]
    assert stalled.times[SLOW][0] < prompt.times[SLOW][0] + 0.5  # it gives storage up, and is computed


def test_a_request_that_waits_for_storage_changes_no_plan():
    """While it waits, every plan is the one that is made if it had never come."""
    without = scenario()
    without.clients = [client for client in without.clients if client.id != SLOW]
    stalled, alone = Run(scenario(), of_the_slow_one(scenario())), Run(without, lambda asked: False)
    prompt = next(client.prompt for client in scenario().clients if client.id == SLOW)
    joined = next(n for n, plan in enumerate(stalled.plans) if any(list(new.tokens) == prompt for new in plan.new))
    assert joined > 5
    assert stalled.plans[:joined] == alone.plans[:joined]


def test_a_host_block_with_other_content_than_its_key_says_is_found_at_once():
    world = PlainWorld(scenario())
    cache = world.engine.cache
    assert cache is not None
    copy = cache._copy_half

    def flipped(move: BlockMove, half: int) -> None:
        copy(move, half)
        if move.kind == "store" and half:
            cache.host[move.host[0]][0] ^= 1

    cache._copy_half = flipped
    outcome = world.run()
    assert outcome.invariant == 12
    assert "host block" in outcome.violation


def test_storage_that_has_failed_three_times_in_a_row_may_not_be_asked_for_a_second():
    watch = PlainWorld(scenario()).engine.tiers
    for number in range(3):
        watch.sent(StorageQuery(number, (bytes(32),), 0.2), 0.1 * number, worker_ready=True)
        watch.answered(number, "EIO")
    with pytest.raises(InvariantBroken, match="asked again"):
        watch.sent(StorageQuery(9, (bytes(32),), 0.2), 0.9, worker_ready=True)
    watch.sent(StorageQuery(9, (bytes(32),), 0.2), 1.1, worker_ready=True)
    watch.answered(9, None)
    watch.sent(StorageQuery(10, (bytes(32),), 0.2), 1.2, worker_ready=True)


def test_a_storage_that_never_comes_back_costs_time_and_nothing_else():
    made = scenario()
    made.cache_faults = [CacheFault(move, "silent") for move in range(1, 40, 3)]
    outcome = PlainWorld(made).run()
    assert outcome.invariant is None, outcome.violation
    assert "storage never came back from a call" in outcome.sometimes
    assert "the cache service died" in outcome.sometimes, "it was replaced, because its threads are stuck"


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_said_to_a_former_life_of_the_service_is_never_done(kept):
    """The engine is frozen while the service restarts: each life has a socket of its own."""
    cache = PlainWorld(scenario()).engine.cache
    assert cache is not None
    heard: list[object] = []
    cache.connect(heard.append)
    cache._ready(True)
    cache.received(heard.pop())
    cache.take(StorageQuery(1, (bytes(32),), 0.2))
    assert cache._taken == 1
    cache.crash()
    cache._ready(kept)
    cache.take(StorageQuery(2, (bytes(32),), 0.2))
    assert cache._taken == 1, "the engine has not read CacheLost yet"
    cache.received(heard.pop())
    cache.take(StorageQuery(3, (bytes(32),), 0.2))
    assert cache._taken == 2


def by_tokens() -> Scenario:
    made = scenario()
    made.storage_tokens = True
    return made


def test_storage_that_wants_token_ids_changes_no_answer():
    world = PlainWorld(by_tokens())
    outcome = world.run()
    assert outcome.invariant is None, outcome.violation
    assert "storage was sent token ids" in outcome.sometimes


PROMPT = [4, 4, 4, 4, 4, 4, 4, 4, 4, 3]
"""Of r3: five blocks of two."""


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        (PROMPT[:6], slice(0, 3)),
        (PROMPT, slice(3, 5)),
    ],
)
def test_the_token_ids_of_its_keys_are_right(tokens, keys):
    watch = PlainWorld(by_tokens()).engine.tiers
    chain = list(watch.contents.chain("", PROMPT))
    watch.sent(StorageQuery(1, tuple(chain[keys]), 0.2, pack_tokens(tokens)), 0.1, worker_ready=True)


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        ([], slice(0, 3)),
        (PROMPT, slice(0, 3)),
        (PROMPT[:5], slice(0, 2)),
        (PROMPT[4:], slice(2, 5)),
        ([5, *PROMPT[1:]], slice(0, 5)),
    ],
)
def test_token_ids_that_are_not_those_of_the_keys_are_found(tokens, keys):
    watch = PlainWorld(by_tokens()).engine.tiers
    chain = list(watch.contents.chain("", PROMPT))
    with pytest.raises(InvariantBroken, match="token ids") as broken:
        watch.sent(StorageQuery(1, tuple(chain[keys]), 0.2, pack_tokens(tokens)), 0.1, worker_ready=True)
    assert broken.value.invariant == 55


def test_nobody_is_told_token_ids_who_does_not_want_them():
    watch = PlainWorld(scenario()).engine.tiers
    chain = list(watch.contents.chain("", PROMPT))
    with pytest.raises(InvariantBroken, match="against what storage wants"):
        watch.sent(StorageQuery(1, tuple(chain), 0.2, pack_tokens(PROMPT)), 0.1, worker_ready=True)
