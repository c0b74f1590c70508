"""A pair whose copies do not arrive is not used as a pair: prompts are not computed twice, again and again."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.core.cluster.paths import DOUBLINGS_MAX, FREE_FAILURES, SECONDS
from baton.protocol.handoff import Prefill

from .harness import Room, request

CONFIG = RouterConfig(handoff="always", handoff_tokens_min=0)


def ask(room: Room, number: int) -> None:
    """A prompt of its own, and all of its answer."""
    room.arrive(request(f"r{number}", prompt=tuple(range(100 * number, 100 * number + 40))))
    room.run()
    room.assert_right(f"r{number}")


def prompts(instance) -> int:
    return sum(type(message) is Prefill for message in instance.heard)


@pytest.fixture
def room() -> Room:
    room = Room("prefill", "decode", config=CONFIG)
    prefill, decode = room.instances
    decode.unreadable = prefill.hello.peers
    return room


def outcomes(room: Room) -> tuple[int, int]:
    ends = room.router.stats.handoff_ends
    return ends["adopted"], ends["not_copied"]


def test_after_some_in_vain_decode_computes_prompts_itself(room: Room):
    prefill, _ = room.instances
    for number in range(1, FREE_FAILURES + 3):
        ask(room, number)
    assert prompts(prefill) == FREE_FAILURES + 1
    assert outcomes(room) == (0, FREE_FAILURES + 1)
    assert room.router.stats.handoffs == 0, "none went through"
    assert room.router.stats.paths_given_up == 1
    assert room.router.stats.retries == 0, "no answer was begun anew for it"


def test_why_a_pair_does_not_work_is_known_until_it_works(room: Room):
    prefill, decode = room.instances
    ask(room, 1)
    ask(room, 2)
    instances = {member.name: member for member in room.router.membership.instances.values()}
    failed = instances[decode.hello.name].paths.failed()
    assert [(each.failures, each.fault) for each in failed.values()] == [(2, "no route")]
    assert list(failed) == [instances[prefill.hello.name].session]
    decode.unreadable = ()
    ask(room, 3)
    assert not instances[decode.hello.name].paths.failed()


def test_it_is_tried_again_less_and_less_often(room: Room):
    prefill, _ = room.instances
    tried_at = []
    for number in range(1, 160):
        before = prompts(prefill)
        ask(room, number)
        if prompts(prefill) > before:
            tried_at.append(room.now)
        room.wait(1.0)
    gaps = [
        round(later - earlier, 3)
        for earlier, later in zip(tried_at[FREE_FAILURES:], tried_at[FREE_FAILURES + 1 :], strict=False)
    ]
    assert len(gaps) >= 5
    assert all(SECONDS <= gap <= SECONDS * 2**DOUBLINGS_MAX + 10 for gap in gaps)
    assert gaps == sorted(gaps)


def test_one_that_arrives_ends_the_row(room: Room):
    prefill, decode = room.instances
    for number in range(1, FREE_FAILURES + 2):
        ask(room, number)
    decode.unreadable = ()
    room.wait(SECONDS)
    for number in range(10, 15):
        ask(room, number)
    assert outcomes(room) == (5, FREE_FAILURES + 1)
    assert prompts(prefill) == FREE_FAILURES + 6


def test_another_prefill_instance_that_can_be_read_is_used():
    room = Room("prefill", "prefill", "decode", config=CONFIG)
    unreadable, readable, decode = room.instances
    decode.unreadable = unreadable.hello.peers
    for number in range(1, 40):
        ask(room, number)
    assert FREE_FAILURES < prompts(unreadable) <= FREE_FAILURES + 1 + DOUBLINGS_MAX
    assert prompts(unreadable) + prompts(readable) == 39, "decode computes none"


def test_a_lapsed_lease_is_no_fault_of_the_way_between_them():
    room = Room("prefill", "decode", config=CONFIG)
    room.instances[0].lapsed = True
    for number in range(1, 2 * FREE_FAILURES + 3):
        ask(room, number)
    assert outcomes(room) == (0, 2 * FREE_FAILURES + 2)
    assert room.router.stats.paths_given_up == 0


def test_a_prompt_that_its_source_could_not_keep_is_no_fault_of_the_way_between_them():
    """Seed 635 of a cluster: the blocks had made way on the prefill instance, and three such prompts gave the pair up."""
    room = Room("prefill", "decode", config=CONFIG)
    room.instances[0].keeps_nothing = True
    for number in range(1, 2 * FREE_FAILURES + 3):
        ask(room, number)
    assert outcomes(room) == (0, 2 * FREE_FAILURES + 2)
    assert room.router.stats.paths_given_up == 0


def test_one_that_comes_back_is_another_one(room: Room):
    prefill, decode = room.instances
    for number in range(1, FREE_FAILURES + 2):
        ask(room, number)
    room.kill(prefill)
    again = room.restart(prefill)
    decode.unreadable = ()
    ask(room, 50)
    assert prompts(again) == 1
    assert len(room.router.membership.names[decode.hello.name].paths) == 0
