"""Who lives, who is suspected, who is given up, who does not fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster.events import CloseSession, InstanceJoined, InstanceLeft, InstanceMessage, RouterTick, Session
from baton.protocol.control import InstanceStats
from baton.protocol.ids import Instant
from baton.protocol.instance import Heartbeat

from .harness import Room, Scripted, hello, request


def names(room):
    room.router.membership.roster.refresh(Instant(room.now))
    return [member.name for member in room.router.membership.instances.values() if member.place is not None]


def test_beats_keep_it_alive():
    room = Room("mixed")
    room.wait(30)
    assert names(room) == ["mixed-0"]
    assert not room.hung_up


def test_silent_for_a_second_is_suspect_and_gets_nothing_new_and_is_welcome_when_it_speaks():
    room = Room("mixed", "mixed")
    first, second = room.instances
    room.wait(1.0, silent=[first])
    assert names(room) == ["mixed-1"]
    for number in range(4):
        room.arrive(request(f"r{number}"))
    assert not first.assigned
    assert len(second.assigned) == 4
    room.say(first, first.beat())
    assert len(names(room)) == 2


def test_silent_for_two_seconds_is_given_up_and_its_requests_go_on():
    room = Room("mixed", "mixed")
    room.arrive(request())
    room.step()
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    room.wait(2.25, silent=[decoder])
    assert "2 s" in room.hung_up[decoder.session]
    room.run()
    room.assert_right()


def test_any_word_is_a_sign_of_life():
    room = Room("mixed")
    (only,) = room.instances
    for _ in range(20):
        room.now += 0.5
        room.say(only, InstanceStats())
        room.dispatch(RouterTick())
    assert names(room) == ["mixed-0"]


def test_silence_is_looked_at_when_time_is_told_and_not_before():
    """After a pause of the whole router what was said is behind other news."""
    room = Room("mixed", "mixed")
    room.now += 10
    room.arrive(request())
    for instance in room.instances:
        room.say(instance, instance.beat())
    room.dispatch(RouterTick())
    assert not room.hung_up
    room.run()
    room.assert_right()


def test_a_fault_means_no_new_work_until_it_is_mended():
    room = Room("mixed")
    (only,) = room.instances
    room.say(only, Heartbeat(fault="no progress", blocks_available=64, slots_free=8))
    room.arrive(request())
    assert not only.assigned
    room.say(only, only.beat())
    assert only.assigned
    room.run()
    room.assert_right()


@pytest.mark.parametrize("mode", ["draining", "paused"])
def test_one_that_does_not_serve_gets_nothing_new(mode):
    room = Room("mixed", "mixed")
    first, second = room.instances
    room.say(first, InstanceStats(mode=mode))
    for number in range(3):
        room.arrive(request(f"r{number}"))
    assert (len(first.assigned), len(second.assigned)) == (0, 3)
    room.say(first, InstanceStats(mode="serving"))
    assert len(names(room)) == 2


def test_a_drain_waits_for_its_hand_off():
    room = Room("prefill", "decode")
    room.arrive(request())
    room.settle()
    room.step()
    for instance in room.instances:
        room.say(instance, InstanceStats(mode="draining"))
    room.run()
    room.assert_right()
    assert room.router.stats.handoffs == 1


def test_part_is_at_once_and_once():
    room = Room("mixed")
    (only,) = room.instances
    room.kill(only)
    assert not names(room)
    assert room.dispatch(InstanceLeft(only.session, "again")) == []
    assert room.router.stats.instances_lost == 1


def test_what_an_earlier_session_says_is_not_heard():
    room = Room("mixed", "mixed")
    room.arrive(request())
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    decoder.step()
    late = list(decoder.out)
    session = decoder.session
    room.kill(decoder)
    room.settle()
    for message in late:
        assert room.dispatch(InstanceMessage(session, message)) == []
    room.run()
    room.assert_right()


def test_same_name_again_ends_the_earlier_session():
    room = Room("mixed", "mixed")
    first, _ = room.instances
    for number in range(4):
        room.arrive(request(f"r{number}"))
    room.step()
    session = first.session
    again = Scripted(first.hello)
    del room.live[session]
    room.instances.remove(first)
    room.join(again)
    assert room.hung_up == {session: "mixed-0 has joined again"}
    room.run()
    for number in range(4):
        room.assert_right(f"r{number}")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"identity": b"other"}, "identity"),
        ({"layout": b"other"}, "layout"),
        ({"block_size": 8}, "block size"),
        ({"vocab_size": 7}, "vocabulary"),
        ({"model_context_tokens": 7}, "context"),
    ],
)
def test_one_that_does_not_fit_is_refused_with_the_reason(change, word):
    room = Room("mixed")
    (effect,) = room.dispatch(InstanceJoined(Session(77), hello("other", **change)))
    assert isinstance(effect, CloseSession)
    assert word in effect.reason
    assert "mixed-0" in effect.reason
    assert names(room) == ["mixed-0"]


def test_pools_of_different_sizes_fit():
    room = Room("mixed")
    room.join(Scripted(hello("large", blocks=500, context_tokens=9000)))
    assert len(names(room)) == 2


def test_identity_changes_when_all_are_reloaded():
    room = Room("mixed", "mixed")
    first, second = room.instances
    room.kill(first)
    new = Scripted(hello("mixed-0", identity=b"new"))
    room.join(new)
    assert "identity" in room.hung_up[new.session]
    room.kill(second)
    room.join(Scripted(hello("mixed-1", identity=b"new")))
    room.join(Scripted(hello("mixed-0", identity=b"new")))
    assert len(names(room)) == 2


def test_an_answer_does_not_go_on_with_other_weights():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request("begun"))
    room.step()
    room.arrive(request("new", prompt=(9,) * 20))
    room.kill(only)
    room.join(Scripted(hello("mixed-0", identity=b"new")))
    room.wait(1)
    assert room.broken_off == {"begun": "worker_gone"}
    room.run()
    room.assert_right("new")


def test_one_that_does_not_fit_drives_nobody_out_by_having_the_same_name():
    """Found by an audit: the one that was here was hung up on, and the stranger was the cluster."""
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request())
    room.step()
    stranger = room.join(Scripted(hello("mixed-0", identity=b"other")))
    assert list(room.hung_up) == [stranger.session]
    assert names(room) == ["mixed-0"]
    assert only.assigned
    room.run()
    room.assert_right()


@pytest.mark.parametrize("begun", [False, True], ids=["all are lost", "the router is new"])
def test_one_that_was_refused_before_does_not_say_what_fits_while_others_may_come_back(begun):
    """Found by an audit: a router was started again, a stray instance with other weights dialled first, and all of the cluster
    was refused while clients got its answers."""
    room = Room() if begun else Room("mixed")
    for each in list(room.instances):
        room.kill(each)
    stray = hello("stray", identity=b"other", refused=True)
    early = room.join(Scripted(stray))
    assert "may come back" in room.hung_up[early.session]
    room.wait(4)
    back = room.join(Scripted(hello("mixed-0")))
    late = room.join(Scripted(stray))
    assert "identity" in room.hung_up[late.session]
    assert names(room) == ["mixed-0"]
    room.kill(back)
    room.wait(9)
    assert "may come back" in room.hung_up[room.join(Scripted(stray)).session]
    room.wait(1)
    room.join(Scripted(stray))
    assert names(room) == ["stray"], "nobody came back"


def test_one_that_does_not_fit_those_that_were_here_a_moment_ago_lets_them_come_back():
    """Found with the rehearsal: all were lost for a moment, an instance that nobody had refused yet dialled first, and all of
    the cluster was refused from then on."""
    room = Room("mixed", "mixed")
    for each in list(room.instances):
        room.kill(each)
    room.wait(3)
    early = room.join(Scripted(hello("stray", identity=b"other")))
    assert "mixed-0 may come back within 7 s" in room.hung_up[early.session]
    room.join(Scripted(hello("mixed-1")))
    assert names(room) == ["mixed-1"]


def test_nobody_waits_for_those_that_have_come_back_with_other_weights():
    room = Room("mixed", "mixed")
    for each in list(room.instances):
        room.kill(each)
    first = room.join(Scripted(hello("mixed-0", identity=b"new")))
    assert "mixed-1 may come back" in room.hung_up[first.session]
    room.join(Scripted(hello("mixed-1", identity=b"new")))
    assert names(room) == ["mixed-1"], "all of them have"
    room.join(Scripted(hello("mixed-0", identity=b"new", refused=True)))
    assert len(names(room)) == 2


def test_nobody_waits_for_one_that_was_stopped_with_care():
    room = Room("mixed")
    (only,) = room.instances
    room.say(only, InstanceStats(mode="draining"))
    room.kill(only)
    room.join(Scripted(hello("next", identity=b"new")))
    assert names(room) == ["next"]


def test_those_that_got_other_weights_by_order_do_not_wait_for_one_that_was_lost_before():
    room = Room("mixed", "mixed")
    lost, stays = room.instances
    room.kill(lost)
    room.dispatch(InstanceLeft(stays.session, "other weights", reloaded=True))
    room.join(Scripted(hello("mixed-1", identity=b"new")))
    assert names(room) == ["mixed-1"]
    old = room.join(Scripted(hello("mixed-0")))
    assert "identity" in room.hung_up[old.session]


def test_whether_somebody_fits_is_a_question():
    """It was the first to ask that set the time since when nobody is here."""
    room = Room()
    membership = room.router.membership
    stray = hello("stray", refused=True)
    for _ in range(2):
        assert not membership.misfit(stray, room.now)
    membership.record_dial(room.now)
    assert "was refused before" in membership.misfit(stray, room.now)


def test_two_instances_with_one_name_the_live_one_stays():
    room = Room("mixed")
    (first,) = room.instances
    room.arrive(request(max_tokens=40))
    other = hello("mixed-0", incarnation=2)
    for _ in range(10):
        room.step()
        room.wait(0.5)
        rival = room.join(Scripted(other))
        assert "a name of its own (--name)" in room.hung_up[rival.session]
    assert first.session not in room.hung_up
    room.run()
    room.assert_right()
    assert room.router.stats.losses["joined_again"] == 0


def test_the_name_of_one_that_is_silent_can_be_taken():
    room = Room("mixed")
    (first,) = room.instances
    room.now += 1.1
    again = room.join(Scripted(hello("mixed-0", incarnation=2)))
    assert list(room.hung_up) == [first.session]
    room.arrive(request())
    assert again.assigned


def test_one_that_is_refused_for_its_name_learns_when_the_name_is_free_if_the_other_is_dead():
    room = Room("mixed")
    room.now += 0.4
    (effect,) = room.dispatch(InstanceJoined(Session(77), hello("mixed-0", incarnation=2)))
    assert isinstance(effect, CloseSession)
    assert effect.retry_seconds == pytest.approx(0.6)
    room.now += effect.retry_seconds
    again = room.join(Scripted(hello("mixed-0", incarnation=2)))
    assert again.session not in room.hung_up
    (effect,) = room.dispatch(InstanceJoined(Session(78), hello("mixed-1", identity=b"other")))
    assert (type(effect), effect.retry_seconds) == (CloseSession, 0.0), "it does not fit: time changes nothing"


def test_one_that_was_refused_for_its_name_does_not_wait_for_itself():
    """The other one is lost. They are alike: nobody who does not fit is let in by that."""
    room = Room("mixed")
    (first,) = room.instances
    rival = room.join(Scripted(hello("mixed-0", incarnation=2)))
    assert rival.session in room.hung_up
    room.kill(first)
    again = room.join(Scripted(hello("mixed-0", incarnation=2, refused=True)))
    assert again.session not in room.hung_up


def test_one_more_than_may_be_is_not_the_one_that_has_joined_again():
    room = Room("mixed", "mixed", config=RouterConfig(instances_max=2))
    again = room.join(Scripted(hello("mixed-0")))
    assert again.session not in room.hung_up
    assert len(names(room)) == 2


def test_too_many_instances_are_refused():
    room = Room("mixed", "mixed", config=RouterConfig(instances_max=2))
    extra = room.join(Scripted(hello("extra")))
    assert "2 instances" in room.hung_up[extra.session]


def test_one_that_is_lost_again_and_again_is_the_last_choice():
    room = Room("mixed", "mixed")
    crashing, steady = room.instances
    for _ in range(3):
        room.kill(crashing)
        crashing = room.restart(crashing)
    for number in range(3):
        room.arrive(request(f"r{number}"))
    assert (len(crashing.assigned), len(steady.assigned)) == (0, 3)
    room.kill(steady)
    room.wait(0.75)
    assert len(crashing.assigned) == 3, "the last choice is a choice"
    room.run()


def test_one_that_lived_long_is_not_in_a_row_of_losses():
    room = Room("mixed", "mixed")
    crashing, steady = room.instances
    for _ in range(4):
        room.wait(31)
        room.kill(crashing)
        crashing = room.restart(crashing)
    for number in range(4):
        room.arrive(request(f"r{number}", prompt=(number,) * 30))
    assert crashing.assigned
    assert steady.assigned


def test_room_is_what_the_beat_said_less_what_was_sent_since():
    room = Room("mixed")
    (only,) = room.instances
    (member,) = room.router.membership.instances.values()
    room.say(only, Heartbeat(blocks_available=40, slots_free=5, waiting_tokens=7))
    room.arrive(request(tokens=40, n=2))
    assert member.slots_free == 3
    assert member.blocks_available == 40 - 11 - 1
    assert member.waiting_tokens == 47
    room.run()
    assert member.slots_free == 8


def test_one_that_joins_does_not_put_off_the_end_of_one_that_is_silent():
    room = Room("mixed")
    (silent,) = room.instances
    room.now += 2.5
    late = room.join(Scripted(hello("late")))
    assert room.router.next_deadline() <= room.now
    room.dispatch(RouterTick())
    assert list(room.hung_up) == [silent.session]
    assert names(room) == [late.hello.name]


def test_one_that_takes_longer_to_adopt_than_the_router_waits_is_refused_with_the_numbers():
    room = Room("decode", config=RouterConfig(handing_seconds_max=7.0))
    slow = Scripted(replace(hello("slow", "decode"), adopt_seconds_max=7.0))
    room.join(slow)
    (reason,) = [why for session, why in room.hung_up.items() if session == slow.session]
    assert "7 s" in reason
    assert "handing_seconds_max" in reason
    quick = Scripted(replace(hello("quick", "decode"), adopt_seconds_max=6.9))
    room.join(quick)
    assert quick.session not in room.hung_up
