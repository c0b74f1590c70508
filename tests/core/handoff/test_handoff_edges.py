"""Hand-offs where they meet the rest of an instance: poison, sleep, priorities, storage, a pool that is lost. Each of these has
a small change of the code that only this file notices."""

from __future__ import annotations

import pytest

from baton.core.effects import Mode
from baton.core.engine.phase import Phase
from baton.core.events import Pause, Resume, Sleep, StorageAnswered, Submit, Wake, WorkerStopped
from baton.protocol.handoff import Adopted, Offer, Release, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.moves import BlockMove, StorageAnswer, StorageQuery
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason

from ..engine.harness import make_request, undisturbed
from ..engine.pair import Pair
from .test_handoff_destination import PROMPT, Decoder, handed
from .test_handoff_source import Prefiller, prefilled

A = RequestId("a")

# What is believed


@pytest.mark.parametrize("computed", [4, 9, 12, 13])
def test_no_more_is_believed_than_was_computed_there(computed: int):
    """Its blocks are whole as copies, and hold nothing behind what was computed."""
    node = Decoder()
    node.expect()
    memory = node.other.worker.memory
    for block, place in [key for key in memory if (key[0] - 100) * 4 + key[1] >= computed]:
        memory[block, place] = 0
    node.offer(0, 4, last=True, tokens=computed)
    node.all_pulled()
    node.release()
    assert [adopted.tokens for adopted in node.take(Adopted)] == [computed]
    node.goes_on()


# Storage


def test_storage_is_asked_at_once_when_nothing_was_handed_over():
    """In the event in which the hand-off fails, although there is no slot for it: when its turn comes the answer is there."""
    node = Decoder(host_blocks=16, storage=True, slots=1, blocks=32)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=40)))
    node.expect()
    node.offer(0, 4, last=True)
    node.told.clear()
    node.release(kept=False)
    assert node.leader.phase is not Phase.DECODE
    assert "StorageQuery" in [type(message).__name__ for message in node.told]


@pytest.mark.parametrize("came", [0, 1, 2])
def test_storage_is_asked_for_what_a_pull_did_not_bring(came: int):
    """Prefill has kept everything, and cannot be read: the release alone brings no block here."""
    node = Decoder(host_blocks=16, storage=True)
    node.expect()
    node.offer(0, 4, last=True)
    node.carry_out("pull", moved=came, error="nobody is there")
    node.release()
    assert [adopted.tokens for adopted in node.take(Adopted)] == [4 * came]
    (query,) = [message for message in node.told if isinstance(message, StorageQuery)]
    assert len(query.keys) == 3 - came
    assert (node.instance.stats.adopted, node.instance.stats.not_adopted) == (came > 0, came == 0)
    node.dispatch(StorageAnswered(StorageAnswer(query.id, 0)))
    node.said = type(node.said)(message for message in node.said if isinstance(message, Emit))
    node.goes_on()


def test_without_lower_tiers_a_short_pull_keeps_its_room():
    node = Decoder()
    node.expect()
    node.offer(0, 4, last=True)
    node.carry_out("pull", moved=0, error="nobody is there")
    node.release()
    assert len(node.leader.blocks) == 4
    node.take(Adopted)
    node.goes_on()


# A pool that is lost


def test_a_pull_that_waits_for_its_fence_never_writes_to_another_pool():
    """It waited for plans of the worker that is lost. The next one has another pool, in which these blocks are anybody's."""
    node = Decoder(steps_in_flight=1)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=9)))
    node.expect()
    node.offer(0, 2)
    assert not node.told, "a plan is out that may write to its blocks"
    node.lose_worker("timeout")
    node.restart_worker(pool_kept=False)
    node.step()
    assert not [message for message in node.told if isinstance(message, BlockMove) and message.kind == "pull"]
    node.offer(2, 4, last=True)
    assert not [message for message in node.told if isinstance(message, BlockMove) and message.kind == "pull"]
    assert not node.take(Release)
    assert [adopted.tokens for adopted in node.take(Adopted)] == [0]
    node.settle()
    assert node.outputs() == undisturbed(node.request)[1:]


def test_a_pull_under_way_into_a_pool_that_is_lost_is_not_believed():
    node = Decoder()
    node.expect()
    node.offer(0, 4, last=True)
    (pull,) = node.told
    node.lose_worker("killed")
    node.restart_worker(pool_kept=False)
    assert [adopted.tokens for adopted in node.take(Adopted)] == [0]
    held = node.held
    node.all_pulled()  # what it says of the old pool's blocks
    assert node.held <= held
    assert pull.pool != node.pool_incarnation
    node.goes_on()


# Poison


def test_a_prompt_that_kills_its_worker_ends_as_poison_and_nothing_is_kept():
    node = Prefiller()
    node.prefill()
    node.step()
    for _ in range(2):
        node.lose_worker("died")
        node.restart_worker(pool_kept=True)
        if node.plans:
            node.execute()
    (end,) = node.ends()
    assert (end.reason, end.error) == (FinishReason.ERROR, "poison")
    assert not [offer for offer in node.take(Offer) if offer.last]
    assert not node.kept
    node.said.clear()
    node.run()
    node.assert_at_rest()


def test_poison_on_the_prefill_side_frees_what_decode_keeps():
    pair = Pair(chunk_tokens_max=4, steps_in_flight=1)
    routed = pair.start("a", PROMPT, max_tokens=4)
    pair.run(until=lambda: bool(pair.prefill.plans))
    for _ in range(2):
        pair.prefill.lose_worker("died")
        pair.prefill.restart_worker(pool_kept=True)
    pair.run()
    assert routed.ended[0].error == "poison"
    assert not routed.adopted
    pair.assert_at_rest()
    pair.start("b", tuple(range(30, 44)), max_tokens=4)
    pair.run()
    pair.assert_answered("b")
    pair.assert_at_rest()


def test_a_kill_from_outside_is_no_poison_however_often():
    pair = Pair(chunk_tokens_max=4, steps_in_flight=1)
    pair.start("a", PROMPT, max_tokens=4)
    pair.run(until=lambda: bool(pair.prefill.plans))
    for _ in range(5):
        pair.prefill.lose_worker("killed")
        pair.prefill.restart_worker(pool_kept=True)
    pair.run()
    pair.assert_answered()
    pair.assert_at_rest()


# Sleep


def test_an_instance_that_keeps_a_prompt_does_not_sleep_until_it_is_copied():
    node = prefilled()
    node.dispatch(Pause())
    node.dispatch(Sleep(1))
    assert node.orders == {1: "refused"}
    assert node.ask() is True
    assert node.modes == [Mode.DRAINING, Mode.PAUSED]
    node.dispatch(Sleep(2))
    node.dispatch(WorkerStopped())
    assert node.orders[2] == "done"


def test_an_instance_that_expects_a_prompt_does_not_sleep_until_that_is_over():
    node = handed()
    node.dispatch(Pause())
    node.dispatch(Sleep(1))
    assert node.orders == {1: "refused"}
    node.release()
    node.settle()
    assert node.modes[-1] is Mode.PAUSED
    node.dispatch(Sleep(2))
    node.dispatch(WorkerStopped())
    assert node.orders[2] == "done"


def test_hand_offs_go_on_after_a_sleep_on_either_side():
    """Its pool is another one then: nothing of before is believed, and nothing is left of it."""
    pair = Pair(chunk_tokens_max=5)
    pair.start("a", PROMPT, max_tokens=4)
    pair.run()
    for number, node in enumerate((pair.prefill, pair.decode)):
        node.dispatch(Pause())
        node.dispatch(Sleep(10 * number + 1))
        node.dispatch(WorkerStopped())
        node.dispatch(Wake(10 * number + 2))
        node.restart_worker(pool_kept=False)
        node.dispatch(Resume(10 * number + 3))
        name = f"after{number}"
        pair.start(name, PROMPT, max_tokens=4)
        pair.run()
        pair.assert_answered(name)
    assert pair.routed_requests["after1"].kept is True
    pair.assert_at_rest()


def test_late_messages_of_a_hand_off_reach_an_instance_that_sleeps():
    node = handed()
    node.dispatch(Pause(drain_seconds_max=1.0))
    node.advance(1.0)
    node.run()
    node.dispatch(Sleep(1))
    node.dispatch(WorkerStopped())
    assert node.orders == {1: "done"}
    node.release()
    node.offer(0, 4, last=True)
    node.expect("b")
    assert node.refusals() == ["paused"]
    assert node.held == 0


# Priorities


def test_an_urgent_request_is_not_refused_for_the_growth_of_what_would_make_way_for_it():
    node = Decoder(blocks=8, reserve_start=1.0)
    node.dispatch(Submit(make_request("b", (1, 2, 3), max_tokens=18, priority=5)))
    node.expect(priority=5)
    assert node.refusals() == ["no_room"]
    node.expect("urgent", priority=0)
    assert node.take(Reserved)


def test_whoever_is_adopted_waits_behind_the_more_urgent_and_before_the_less_urgent():
    node = Decoder(slots=1, blocks=64, steps_in_flight=1)
    node.dispatch(Submit(make_request("runs", (1, 2, 3), max_tokens=12, priority=0)))
    node.expect(priority=3)
    node.offer(0, 4, last=True)
    node.step()  # the plan is over that may have written to its blocks
    node.dispatch(Submit(make_request("less", (7, 8, 9), max_tokens=2, priority=5)))
    node.dispatch(Submit(make_request("more", (4, 5, 6), max_tokens=2, priority=1)))
    node.all_pulled()
    node.release()
    node.settle()
    assert [end.request for end in node.ends()] == ["runs", "more", "a", "less"]
    assert node.outputs() == undisturbed(node.request)[1:]


def test_of_two_that_have_room_the_last_in_line_gives_it_up_first():
    node = Decoder(blocks=12, steps_in_flight=1)
    node.dispatch(Submit(make_request("runs", (1, 2, 3), max_tokens=25)))
    node.expect("first", tuple(range(20, 32)))
    node.expect("second", tuple(range(40, 52)))
    first, second = (node.instance.board.groups[RequestId(name)].leader for name in ("first", "second"))
    while first.blocks and second.blocks:
        node.step()
    assert first.blocks, "it was there before"
    assert not second.blocks
    assert node.instance.stats.preemptions == 0


def test_the_less_urgent_does_not_get_room_that_is_kept_for_the_more_urgent():
    node = Decoder(blocks=6, steps_in_flight=1)
    node.expect(priority=0)
    held = node.held
    node.dispatch(Submit(make_request("patient", tuple(range(40, 56)), max_tokens=4, priority=5)))
    for _ in range(30):
        node.step() if node.plans or node.results else None
    assert node.held == held
    assert not node.ends()
    node.offer(0, 4, last=True)
    node.all_pulled()
    node.release()
    node.settle()
    assert {end.request for end in node.ends()} == {"a", "patient"}
    node.said.clear()
    node.assert_at_rest()


def test_room_that_is_kept_for_the_less_urgent_is_given_to_the_more_urgent():
    """It stays LOADING without its blocks, and is computed when it knows its tokens."""
    node = Decoder(blocks=6, steps_in_flight=1)
    node.expect(priority=5)
    assert node.held == 4
    node.dispatch(Submit(make_request("urgent", tuple(range(40, 56)), max_tokens=4, priority=0)))
    for _ in range(30):
        node.step() if node.plans or node.results else None
    assert "urgent" in {end.request for end in node.ends()}, "it does not wait for somebody else's prompt"
    node.offer(0, 4, last=True)
    node.all_pulled()
    node.release()
    node.settle()
    assert node.outputs() == undisturbed(node.request)[1:]
    node.said.clear()
    node.assert_at_rest()
