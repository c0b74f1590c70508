"""The index of cached prefixes: guesses, digests, their bounds, and questions about keys without parents."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster.events import InstanceMessage, WarnOfInstance
from baton.core.cluster.prefix_index import GUESS_SECONDS, MANY, PrefixIndex
from baton.core.kv.marks import KEY_BYTES, blocks_before, is_mark, marks_of, short_keys
from baton.protocol.ids import BlockKey, Instant
from baton.protocol.instance import CachedKeys, Heartbeat
from baton.protocol.versions import CACHED_KEYS

from .harness import Room, Scripted, hello, request


def chain(name, blocks):
    return marks_of([BlockKey(f"{name}{place}".rjust(KEY_BYTES)[-KEY_BYTES:].encode()) for place in range(blocks)])


def keys(marks):
    return [key for _, key in marks]


def packed(marks):
    return b"".join(key.to_bytes(KEY_BYTES) for _, key in marks)


def index_of(*blocks, keys_max=1000, publishes=True):
    index = PrefixIndex(keys_max)
    for number, count in enumerate(blocks):
        index.join(number, count, publishes=publishes)
    return index


# Marks


def test_marks_are_the_first_powers_of_two_and_every_32nd_place():
    places = [place for place in range(1, 200) if is_mark(place)]
    assert places == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    assert [place for place, _ in chain("a", 199)] == places
    assert sum(map(blocks_before, places)) == 192, "together they stand for all blocks up to the last one"


def test_short_keys_are_whole_keys():
    assert short_keys(b"") == []
    assert short_keys(packed(chain("a", 4))) == keys(chain("a", 4))
    with pytest.raises(Exception, match="unpack"):
        short_keys(bytes(2 * KEY_BYTES + 4))


def test_a_set_is_read_as_the_numbers_of_its_instances():
    """Large sets are read from their binary digits, small ones bit by bit."""
    rng, index = Random(1), index_of(*[1] * 300, keys_max=10**6)
    for size in (0, 1, 5, MANY, MANY + 1, 40, 150, 300):
        chosen = sorted(rng.sample(range(300), size))
        held = sum(index._known[number].bit for number in chosen)
        assert sorted(index.numbers(held)) == chosen


# Questions


def test_levels_have_each_instance_at_its_deepest_mark():
    index, marks = index_of(100, 100, 100, 100), chain("a", 64)
    index.guess(0, marks)
    index.guess(1, marks[:3])
    index.publish(2, whole=False, added=[marks[4][1]], removed=())  # no parent of it is known
    found = [(depth, index.numbers(held)) for depth, held in index.levels(marks)[:-1]]
    assert found == [(64, [0]), (16, [2]), (4, [1])]
    assert index.levels(marks)[-1] == (0, ~0b111)
    assert [index.depth(number, marks) for number in range(4)] == [64, 4, 16, 0]
    assert (index.deepest(marks), index.deepest(chain("b", 64))) == (64, 0)


@pytest.mark.parametrize("seed", range(3))
def test_questions_agree_with_a_search_through_all_keys(seed):
    """Instances join, leave, publish and are guessed about, in any order; keys have no parents."""
    rng, index, known = Random(seed), PrefixIndex(200), {}
    chains = [chain(name, rng.randrange(1, 150)) for name in range(5)]
    for number in range(300):
        roll = rng.random()
        if roll < 0.1 or not known:
            known[number] = rng.random() < 0.7
            index.join(number, 64, publishes=known[number])
        elif roll < 0.15:
            gone = rng.choice(list(known))
            del known[gone]
            index.forget(gone)
        elif roll < 0.5:
            index.guess(rng.choice(list(known)), rng.choice(chains)[: rng.randrange(8)])
        elif roll < 0.9:
            added, removed = [[key for _, key in rng.choice(chains) if rng.random() < 0.5] for _ in range(2)]
            if publishers := [each for each in known if known[each]]:
                index.publish(rng.choice(publishers), whole=rng.random() < 0.2, added=added, removed=removed)
        else:
            index.expire(rng.choice(list(known)), Instant(number))
        index.check()
        for marks in chains:
            depths = {each: max([place for place, key in marks if index.has(each, key)], default=0) for each in known}
            levels = index.levels(marks)
            found = {each: depth for depth, held in levels[:-1] for each in index.numbers(held)}
            assert found == {each: depth for each, depth in depths.items() if depth}
            assert {each: index.depth(each, marks) for each in known} == depths
            assert sorted(index.numbers(index.holders(keys(marks)))) == sorted(found)


# Guesses


def test_a_guess_counts_until_it_is_confirmed_or_its_time_is_over():
    index, marks = index_of(100), chain("a", 8)
    index.guess(0, marks)
    index.publish(0, whole=False, added=[marks[0][1]], removed=())
    for beat in range(4):
        index.expire(0, Instant(beat * GUESS_SECONDS / 2))
    assert index.depth(0, marks) == 8
    index.expire(0, Instant(2 * GUESS_SECONDS))
    assert index.depth(0, marks) == 1, "of an instance that publishes, only what it confirms is kept"
    assert index.confirmed(0) == [marks[0][1]]


def test_a_guess_that_is_repeated_lives_on():
    index, marks = index_of(100), chain("a", 8)
    for beat in range(10):
        index.guess(0, marks)
        index.expire(0, Instant(beat * GUESS_SECONDS))
    assert index.depth(0, marks) == 8


def test_guesses_about_an_instance_that_publishes_nothing_are_its_last_blocks():
    """The end of a chain, and the oldest chain, are forgotten first. The bound is in blocks, not in marks."""
    index = index_of(40, publishes=False)
    index.guess(0, chain("a", 32))
    index.guess(0, chain("b", 16))
    index.expire(0, Instant(1000 * GUESS_SECONDS))
    assert index.depth(0, chain("b", 16)) == 16
    assert index.depth(0, chain("a", 32)) == 16
    index.guess(0, chain("c", 32))
    assert (index.depth(0, chain("c", 32)), index.depth(0, chain("a", 32)), index.depth(0, chain("b", 16))) == (32, 0, 8)
    index.check()


# Digests


def test_a_snapshot_replaces_what_was_published_and_leaves_guesses():
    index, old, new, sent = index_of(100), chain("old", 4), chain("new", 4), chain("sent", 4)
    index.publish(0, whole=True, added=keys(old), removed=())
    index.guess(0, sent)
    index.publish(0, whole=True, added=keys(new), removed=())
    assert [index.depth(0, marks) for marks in (old, new, sent)] == [0, 4, 4]
    index.publish(0, whole=False, added=(), removed=keys(new)[1:])
    assert index.depth(0, new) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_bounded(seed):
    """One bound for the router, which instances share."""
    rng, index = Random(seed), PrefixIndex(48)
    for number in range(1, 5):
        index.join(number, 16, publishes=number % 2 == 0)
        for _ in range(100):
            marks = chain(rng.randrange(6), rng.randrange(200))
            which = rng.randint(1, number)
            if rng.random() < 0.5 or which % 2:
                index.guess(which, marks)
            else:
                index.publish(which, whole=False, added=keys(marks), removed=())
            assert len(index) <= 48
            assert all(index.count(each) <= 48 // number for each in range(1, number + 1))
            index.check()
    for number in range(1, 5):
        index.forget(number)
        index.check()
    assert len(index) == 0


def publishing(name="liar"):
    return Scripted(replace(hello(name, blocks=400), capabilities=(CACHED_KEYS,)))


def test_an_instance_that_publishes_too_much_is_cut_with_one_word_and_answers_are_right():
    room = Room("mixed", blocks=400, config=RouterConfig(prefix_keys_max=100))
    liar = room.join(publishing())
    warned = []
    for part in range(20):
        added = b"".join((part * 100 + key).to_bytes(KEY_BYTES) for key in range(100))
        effects = room.router.handle(InstanceMessage(liar.session, CachedKeys(added=added)), Instant(room.now))
        warned += [effect for effect in effects if isinstance(effect, WarnOfInstance)]
    assert len(warned) == 1
    assert "50" in warned[0].text, "its share"
    assert len(room.router.membership.index) == 50
    assert room.router.membership.index.cut == 1950
    room.arrive(request("a", tokens=64))
    room.run()
    room.assert_right("a")


def test_an_instance_that_lies_gets_the_work_and_answers_are_right():
    room = Room("mixed", blocks=400)
    liar = room.join(publishing())
    for number in range(4):
        room.arrive(request(f"a{number}", prompt=(number,) * 64))
        marks = room.router.coordinator.routed_requests[f"a{number}"].marks
        room.say(liar, CachedKeys(added=packed(marks)))
    room.run()
    for number in range(4):
        room.assert_right(f"a{number}")
    room.arrive(request("b", prompt=(1,) * 64))
    assert "b" in liar.assigned
    room.run()
    room.assert_right("b")


def test_a_digest_that_is_no_list_of_keys_changes_nothing():
    room = Room("mixed", blocks=400)
    liar = room.join(publishing())
    room.say(liar, CachedKeys(added=packed(chain("a", 8))))
    before = len(room.router.membership.index)
    with pytest.raises(Exception, match="unpack"):
        room.router.handle(InstanceMessage(liar.session, CachedKeys(added=packed(chain("b", 8)), removed=bytes(9))), room.now)
    assert len(room.router.membership.index) == before
    room.router.check()


def test_digests_of_an_ended_session_are_ignored():
    room = Room("mixed", "mixed", blocks=400)
    gone = room.join(publishing("gone"))
    room.kill(gone)
    room.router.handle(InstanceMessage(gone.session, CachedKeys(added=packed(chain("a", 8)))), Instant(room.now))
    assert len(room.router.membership.index) == 0


def test_several_routers_know_the_same_from_digests():
    """The request went through one router; the next of its prefix comes to the other."""
    first, second = Room(), Room()
    for room in (first, second):
        for name in ("a", "b"):
            room.join(publishing(name))
        for instance in room.instances:
            room.say(instance, Heartbeat(blocks_available=400, slots_free=8))
    first.arrive(request("a", prompt=(3,) * 64))
    marks = first.routed.marks
    number = next(place for place, instance in enumerate(first.instances) if instance.assigned)
    first.run()
    second.say(second.instances[number], CachedKeys(True, packed(marks)))
    for each in range(3):
        second.arrive(request(f"b{each}", prompt=(3,) * 64, max_tokens=1))
        assert second.instances[number].assigned
        second.run()
