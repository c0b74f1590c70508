"""No request waits while an instance that could serve it has nothing to do, and nobody overtakes for the same room."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.events import RouterTick, RunPass
from baton.core.cluster.membership import INHIBIT_SECONDS
from baton.core.cluster.placement import Placement
from baton.core.cluster.request_queue import STALE_MAX, RequestQueue
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.handoff import Offer, Reserve
from baton.protocol.ids import Instant
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest

from .harness import Room, Scripted, hello, request


def sent_to(instance):
    """Ids of all requests that it was given, whole or to go on with."""
    whole = [message.id for message in instance.heard if isinstance(message, GenerateRequest)]
    return whole + list(dict.fromkeys(message.request.id for message in instance.heard if isinstance(message, Reserve)))


def pair(prefill_slots=2, decode_slots=64, step_tokens=0, **config):
    room = Room(config=RouterConfig(handoff_tokens_min=8, **config))
    prefill = Scripted(replace(hello("p", "prefill", blocks=8000, slots=prefill_slots), step_tokens=step_tokens))
    decode = Scripted(hello("d", "decode", blocks=8000, slots=decode_slots))
    return room, room.join(prefill), room.join(decode)


def test_decode_is_the_last_choice_of_one_token_requests():
    room, prefill, decode = pair()
    for number in range(5):
        room.arrive(request(f"embedding{number}", prompt=(number,) * 16, max_tokens=1))
    assert len(sent_to(prefill)) == 3, "two at once, and one that waits there"
    assert len(sent_to(decode)) == 2
    room.run()
    for number in range(5):
        room.assert_right(f"embedding{number}")


def test_a_burst_of_one_token_requests_does_not_stop_chats():
    room, _, decode = pair(decode_slots=4)
    for number in range(12):
        room.arrive(request(f"embedding{number}", prompt=(number,) * 16, max_tokens=1))
    room.run()
    room.arrive(request("chat", tokens=5))
    assert "chat" in sent_to(decode)


class FilledByOthers(Scripted):
    """A decode instance of 64 blocks. Another router gives it a request whenever some blocks are free."""

    others = 6

    def beat(self):
        beat = super().beat()
        return replace(beat, blocks_available=20, slots_free=beat.slots_free - self.others)


def large_handoff(decode):
    room = Room(config=RouterConfig(handoff="always", handoff_tokens_min=8))
    room.join(Scripted(hello("p", "prefill", blocks=8000)))
    room.join(decode)
    room.wait(0.5)
    room.arrive(request("large", tokens=120))
    return room


def test_a_large_handoff_waits_at_an_instance_that_other_routers_fill():
    """Its size was never free in a heartbeat, so no reservation was sent, and it was refused after 300 s."""
    decode = FilledByOthers(hello("d", "decode"))
    room = large_handoff(decode)
    room.wait(4.0)
    assert sent_to(decode) == []
    room.wait(2.0)
    assert sent_to(decode) == ["large"]
    assert not any(isinstance(message, Reserve) for message in decode.heard)
    room.run()
    room.assert_right("large")


def test_a_large_handoff_does_not_wait_whole_where_no_other_router_takes_its_room():
    """Those of this router that are ahead of it end some time; then it gets their room and is handed over."""
    decode = FilledByOthers(hello("d", "decode"))
    decode.others = 0
    room = large_handoff(decode)
    room.wait(60.0)
    assert sent_to(decode) == []


def test_a_large_handoff_is_handed_over_where_there_is_room_at_last():
    """However long it waited: an instance with room comes before one to wait at."""
    decode = FilledByOthers(hello("d", "decode"))
    decode.others = 0
    room = large_handoff(decode)
    room.wait(20.0)
    decode.others = 6
    room.holds_passes = True
    room.say(decode, decode.beat())
    free = room.join(Scripted(hello("e", "decode")))
    room.dispatch(RunPass())
    assert (sent_to(decode), sent_to(free)) == ([], ["large"])
    room.holds_passes = False
    room.run()
    room.assert_right("large")


def test_requests_for_the_large_instance_do_not_keep_others_from_the_small_one():
    room = Room(config=RouterConfig(waiting_prompts_max=0))
    large = room.join(Scripted(hello("large", blocks=40, slots=1)))
    small = room.join(Scripted(hello("small", blocks=10, slots=4)))
    for number in range(3):
        room.arrive(request(f"long{number}", prompt=(number,) * 100))
    room.arrive(request("short", tokens=5))
    assert (sent_to(large), sent_to(small)) == (["long0"], ["short"])
    room.run()


def test_those_that_wait_for_a_prefill_instance_do_not_wait_for_the_large_one_too():
    """Seeds 478 and 588 of a cluster: prompts of one length were one lane, though not all answers fit the small instance."""
    room = Room(config=RouterConfig(handoff="always", handoff_tokens_min=0, waiting_prompts_max=0))
    room.join(Scripted(hello("p", "prefill", blocks=80, slots=4)))
    large = room.join(Scripted(hello("large", "decode", blocks=80, slots=1)))
    small = room.join(Scripted(hello("small", "decode", blocks=10, slots=1)))
    large.hold = (Emit,)  # it is busy all the time
    for name, max_tokens in (("a", 200), ("b", 200), ("c", 20)):
        room.arrive(request(name, prompt=(ord(name),) * 20, max_tokens=max_tokens))
    for _ in range(20):
        room.step()
    assert (sent_to(large), sent_to(small)) == (["a"], ["c"])


def test_nobody_overtakes_for_the_same_room():
    """The last one could use the large instance too, but those that wait for it are ahead."""
    room = Room(config=RouterConfig(waiting_prompts_max=0))
    large = room.join(Scripted(hello("large", blocks=40, slots=1)))
    small = room.join(Scripted(hello("small", blocks=10, slots=1)))
    small.hold = (Emit,)  # it is busy all the time
    for name, tokens in (("a", 5), ("b", 100), ("c", 100), ("d", 5), ("e", 5)):
        room.arrive(request(name, tokens=tokens, max_tokens=20))
    assert (sent_to(large), sent_to(small)) == (["a"], ["d"])
    for _ in range(100):
        room.step()
    assert sent_to(large) == ["a", "b", "c", "e"]


def test_a_request_waits_no_longer_than_it_avoids_the_only_instance_with_room():
    """It was on an instance that was lost and is back at once. The other one is full, so nothing else leads to a pass."""
    room = Room(config=RouterConfig(waiting_prompts_max=0, again_seconds=1.0))
    for name in ("a", "b"):
        room.join(Scripted(hello(name, slots=1)))
        room.arrive(request(f"at-{name}", max_tokens=100))
    room.step()
    lost = room.instances[0]
    (moved,) = sent_to(lost)
    room.kill(lost)
    fresh = room.restart(lost)
    assert room.router.queued == 1
    room.wait(2.0)
    assert (room.router.queued, sent_to(fresh)) == (0, [moved])


def test_a_prompt_waits_no_longer_than_it_avoids_the_only_prefill_instance_with_room():
    room = Room(config=RouterConfig(handoff_tokens_min=8, handoff="always", waiting_prompts_max=0, again_seconds=1.0))
    room.join(Scripted(hello("d", "decode", blocks=8000, slots=64)))
    for name in ("p", "q"):
        room.join(Scripted(hello(name, "prefill", blocks=8000)))
        room.arrive(request(f"at-{name}", prompt=(ord(name),) * 40))
        room.settle()
    lost = room.instances[1]
    (moved,) = lost.assigned
    room.kill(lost)
    fresh = room.restart(lost)
    assert room.router.queued == 1
    room.wait(2.0)
    assert (room.router.queued, list(fresh.assigned)) == (0, [moved])


def test_a_request_waits_no_longer_than_the_only_instance_with_room_is_inhibited():
    """Seed 20146 of a cluster: a decode instance was lost three times, and no pass was scheduled for the end of its inhibition.
    Requests that waited for full mixed instances waited for its next heartbeat too."""
    room = Room("mixed", "mixed", slots=1, config=RouterConfig(waiting_prompts_max=0))
    lost, steady = room.instances
    for _ in range(4):
        room.kill(lost)
        lost = room.restart(lost)
    joined_at = room.now
    room.arrive(request("first", max_tokens=100))
    room.arrive(request("second", max_tokens=100))
    assert (sent_to(lost), sent_to(steady)) == ([], ["first"])
    for _ in range(2):
        room.now += 0.75
        for instance in (lost, steady):
            room.say(instance, instance.beat())
    while room.router.queued:
        room.now = max(room.now, room.router.next_deadline())
        room.dispatch(RouterTick())
    assert (room.now, sent_to(lost)) == (joined_at + INHIBIT_SECONDS[1], ["second"])


def test_a_prefill_instance_that_the_first_in_line_avoids_is_free_for_the_others():
    """The first one was on an instance that was lost and is back at once; the other prefill instance is full."""
    room = Room(config=RouterConfig(handoff_tokens_min=8, handoff="always", waiting_prompts_max=0, again_seconds=1.0))
    room.join(Scripted(hello("d", "decode", blocks=8000, slots=64)))
    for name in ("p", "q"):
        room.join(Scripted(hello(name, "prefill", blocks=8000)))
        room.arrive(request(f"at-{name}", prompt=(ord(name),) * 40))
        room.settle()
    lost = room.instances[1]
    room.kill(lost)
    fresh = room.restart(lost)
    room.arrive(request("behind", prompt=(7,) * 40))
    room.settle()
    assert (room.router.queued, list(fresh.assigned)) == (1, ["behind"])
    room.run(400)


@pytest.mark.parametrize("waiting", [16, 26, 60])
def test_prompts_that_wait_for_prefill_do_not_hold_up_those_that_need_none(waiting):
    room, _, decode = pair()
    for number in range(waiting):
        room.arrive(request(f"long{number}", prompt=(number,) * 40))
    room.arrive(request("chat", tokens=5))
    assert "chat" in sent_to(decode)
    room.run(400)
    for number in range(waiting):
        room.assert_right(f"long{number}")


def test_prompts_that_wait_for_prefill_go_on_when_decode_has_their_prefix():
    """The first one is handed over; then decode has the prefix, and computes the short rest of the others itself."""
    room, prefill, decode = pair(decode_slots=64)
    prefix = tuple(range(1, 33))
    for number in range(20):
        room.arrive(request(f"r{number}", prompt=(*prefix, number, number, number)))
    prefill.frozen = True
    assert len(sent_to(decode)) == 2
    prefill.thaw()
    room.step(4)
    assert len(sent_to(decode)) > 10
    room.run(100)


PREFIX = tuple(range(1, 33))


def waiting_for_their_prefix(*names):
    """The decode instance that has it is full, the other one has room, and the prefill instance has enough to do."""
    room = Room(config=RouterConfig(handoff_tokens_min=8, waiting_prompts_max=0))
    prefill = room.join(Scripted(hello("p", "prefill", blocks=8000)))
    decode = room.join(Scripted(hello("d", "decode", blocks=8000, slots=1)))
    room.arrive(request("first", prompt=(*PREFIX, 500, 501, 502)))
    room.run()
    room.arrive(request("busy", tokens=5, max_tokens=50))
    room.join(Scripted(hello("e", "decode", blocks=8000, slots=2)))
    prefill.hold = (Emit, Offer)
    room.arrive(request("long", prompt=(7,) * 200))
    room.settle()
    for name in names:
        room.arrive(request(name, prompt=(*PREFIX, 600, 601, 602)))
    assert room.router.queued == len(names)
    return room, decode


def test_prompts_that_wait_for_prefill_go_to_the_decode_instance_with_their_prefix_when_it_has_room():
    room, decode = waiting_for_their_prefix("chat", "next")
    room.withdraw("busy")
    room.settle()
    assert list(decode.assigned) == ["chat"]
    while decode.assigned:
        decode.step()
        room.settle()
    assert room.router.queued == 0
    room.assert_right("chat")
    room.assert_right("next")


def test_of_many_that_wait_for_the_same_prefix_a_pass_looks_at_one(monkeypatch):
    room, decode = waiting_for_their_prefix(*map(str, range(100)))
    place, looks = Placement.place, []

    def counted(placement, routed, now, closed):
        looks.append(routed.id)
        return place(placement, routed, now, closed)

    monkeypatch.setattr(Placement, "place", counted)
    room.withdraw("busy")
    room.settle()
    assert list(decode.assigned) == ["0"]
    assert len(looks) < 10, "the first one, and who follows it"


@pytest.mark.parametrize(("tokens", "step_tokens", "sent"), [(200, 8192, 81), (200, 100, 2), (4000, 1024, 2), (200, 0, 2)])
def test_a_prefill_instance_gets_prompts_worth_two_of_its_steps(tokens, step_tokens, sent):
    room, _, decode = pair(decode_slots=200, step_tokens=step_tokens)
    for number in range(100):
        room.arrive(request(f"r{number}", prompt=(number,) * tokens, max_tokens=8))
    assert len(sent_to(decode)) == sent
    assert sum(member.prompts for member in room.router.membership.instances.values()) == sent


def test_requests_that_waited_for_a_popular_prefix_leave_nothing_behind():
    """All wait for the same block: the bound is on entries, not on keys."""
    line = RequestQueue(RouterConfig())
    for number in range(500):
        routed = RoutedRequest(request(f"r{number}"), order=(0, number), now=Instant(0.0))
        routed.marks = [(1, 7)]
        line.join(routed)
        line.wait_for_prefill(routed, 1, lambda key: True)
        line.wait_for_prefill(routed, 1, lambda key: True)
        line.leave(routed)
    assert sum(map(len, line._waiters.values())) <= STALE_MAX + 1
    assert line.check() == []


def test_an_instance_is_silent_from_the_moment_for_which_the_look_is_scheduled():
    """Seed 723 of a cluster: `now - received_at` was rounded to less than a second, and no later look was scheduled."""
    rng = Random(1)
    times = [Instant(rng.uniform(0.0, 1000.0)) for _ in range(1000)]
    assert any(at + 0.9 - at < 0.9 for at in times), "some are rounded down"
    for at in times:
        assert ClusterInstance(1, hello("m"), 1, at).is_suspect(Instant(at + 0.9), 0.9)
