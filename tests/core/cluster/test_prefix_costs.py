"""What the index of cached prefixes costs: no change drops more keys than a bounded number, guesses are bounded like all keys,
and an instance cannot send more keys than an honest one does."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from baton.config import KVConfig, RouterConfig
from baton.core.cluster import prefix_index
from baton.core.cluster.events import InstanceMessage
from baton.core.cluster.prefix_index import GUESS_SECONDS, SWEEP_KEYS, PrefixIndex
from baton.core.cluster.router import CHECK_KEYS
from baton.core.kv.digest import CacheDigest, DigestFeed
from baton.core.kv.marks import KEY_BYTES
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey, Instant
from baton.protocol.instance import CACHED_KEYS_MAX, CachedKeys, Heartbeat
from baton.protocol.versions import CACHED_KEYS

from .harness import Room, Scripted, hello, request
from .test_prefix_index import chain, index_of, keys, packed, publishing


class Counted(dict):
    """Counts how often its entries are iterated: each time walks over entries that were deleted at the front."""

    iterations = 0

    def __iter__(self):
        self.iterations += 1
        return super().__iter__()

    def items(self):
        self.iterations += 1
        return super().items()


def full(keys_max, instances=1):
    """The first instance has all keys that it may have."""
    index = index_of(*(10**6,) * instances, keys_max=keys_max)
    for begin in range(0, index.share, 4096):
        index.publish(0, whole=False, added=range(begin, min(begin + 4096, index.share)), removed=())
    return index


# Turns


def test_a_trim_looks_for_all_its_victims_at_once():
    index = full(20_000)
    known = index._known[0]
    known.keys = Counted(known.keys)
    assert index.publish(0, whole=False, added=range(20_000, 24_096), removed=()) >= 4096
    assert known.keys.iterations <= 2
    index.guess(0, marks := chain("a", 300))
    assert known.keys.iterations <= 3
    assert index.depth(0, marks) == 288
    index.check()


def test_a_full_share_is_not_cut_key_by_key():
    """The next keys find room without a search for the oldest."""
    index = full(20_000)
    known = index._known[0]
    known.keys = Counted(known.keys)
    for key in range(20_000, 20_600):
        index.publish(0, whole=False, added=[key], removed=())
    assert known.keys.iterations <= 600 * prefix_index.SPARE / 20_000 + 1
    assert index.count(0) <= 20_000


def swept(index, number, done):
    """Heartbeats until this is true. Each drops a bounded number of keys."""
    for beat in range(1000):
        before = len(index)
        if done():
            return beat
        index.expire(number, Instant(0.0))
        assert before - len(index) <= SWEEP_KEYS
        index.check()
    raise AssertionError("keys are never dropped")


def test_an_instance_that_joins_shrinks_the_shares_of_others_a_part_at_a_time():
    index = full(20_000)
    index.join(1, 1000, publishes=True)
    assert 20_000 - len(index) <= SWEEP_KEYS
    index.check()
    index.publish(1, whole=True, added=range(10**6, 10**6 + 4096), removed=())
    assert len(index) <= 20_000, "an addition drops more than it adds"
    assert swept(index, 1, lambda: index.count(0) <= 10_000) > 2
    assert index.count(1) == 4096


def test_a_snapshot_drops_what_it_voids_a_part_at_a_time():
    index, sent = full(20_000), chain("sent", 64)
    index.guess(0, sent)
    index.publish(0, whole=True, added=range(100), removed=())
    assert len(index) > 15_000
    assert sorted(index.confirmed(0)) == list(range(100))
    assert index.depth(0, sent) == 64
    index.publish(0, whole=False, added=[5_000], removed=[5_001])
    swept(index, 0, lambda: len(index) == 101 + len(sent))
    assert index.has(0, 5_000), "it was void, and was reported again"
    assert not index.has(0, 5_001)


def test_an_instance_that_is_gone_has_nothing_at_once_and_its_keys_are_dropped_later():
    index, marks = full(40_000, instances=2), chain("a", 64)
    index.guess(0, marks)
    index.forget(0)
    assert len(index) > 15_000
    assert (index.deepest(marks), index.holders(keys(marks)), index.levels(marks)) == (0, 0, [(0, ~1)])
    bits = [index.join(number, 10, publishes=True) for number in (2, 3)]
    assert sorted(bits) == [4, 8], "the bit of the other is still in use"
    index.guess(3, marks)
    assert [index.numbers(held) for _, held in index.levels(marks)[:-1]] == [[3]]
    swept(index, 2, lambda: len(index) == len(marks))
    assert index.join(4, 10, publishes=True) == 1


@pytest.mark.parametrize("seed", range(3))
def test_an_index_that_sweeps_slowly_answers_like_one_that_sweeps_at_once(seed, monkeypatch):
    """Only keys that are void may differ: they count as held until they are dropped. In the end both are the same."""
    rng, chains = Random(seed), [chain(name, 150) for name in range(5)]
    slow, fast = PrefixIndex(10**6), PrefixIndex(10**6)
    known, differed = {}, 0

    def both(change, *parts, **more):
        for index, budget in ((slow, 0), (fast, 10**6)):
            monkeypatch.setattr(prefix_index, "SWEEP_KEYS", budget)
            getattr(index, change)(*parts, **more)
            index.check()
            index.check_part(20)

    for number in range(200):
        roll = rng.random()
        which = rng.choice([*known, None])
        if which is None:
            known[number] = rng.random() < 0.8
            both("join", number, 64, publishes=known[number])
        elif roll < 0.1:
            del known[which]
            both("forget", which)
        elif roll < 0.5 or not known[which]:
            marks = rng.choice(chains)[: rng.randrange(8)]
            both("guess", which, marks)
        else:
            added, removed = [[key for _, key in rng.choice(chains) if rng.random() < 0.5] for _ in range(2)]
            both("publish", which, whole=rng.random() < 0.3, added=added, removed=removed)
        for marks in chains:
            for each in known:
                assert sorted(slow.confirmed(each)) == sorted(fast.confirmed(each))
                assert all(slow.has(each, key) for _, key in marks if fast.has(each, key))
            assert set(slow.numbers(slow.holders(keys(marks)))) <= set(known)
        differed += len(slow) > len(fast)
    assert differed > 20
    monkeypatch.setattr(prefix_index, "SWEEP_KEYS", 10**6)
    if known:
        slow.expire(next(iter(known)), Instant(0.0))
        assert [sorted(slow._known[each].keys) for each in known] == [sorted(fast._known[each].keys) for each in known]
        assert len(slow) == len(fast)


# Guesses


def test_guesses_about_an_instance_that_publishes_are_bounded_like_all_keys():
    index = index_of(10**6, keys_max=100)
    for number in range(2000):
        index.guess(0, chain(number, 16))
        index.expire(0, Instant(number * GUESS_SECONDS / 1500))
    known = index._known[0]
    assert len(known.guesses) + len(known.earlier) <= 100
    index.check()
    index.publish(0, whole=False, added=list(known.keys), removed=())
    assert not known.guesses
    assert not known.earlier


def test_a_guess_that_is_not_among_the_keys_is_found_by_the_check():
    index = index_of(100)
    index.guess(0, chain("a", 8))
    index._known[0].guesses[5] = None
    with pytest.raises(InvariantBroken, match="5 guesses are remembered of 4"):
        index.check()


# Checks


def test_a_part_of_the_check_finds_what_is_wrong_in_that_part():
    index = full(1000)
    index._holders[500] = 2  # of no instance
    index.check_part(500)
    with pytest.raises(InvariantBroken, match="holder"):
        index.check_part(1)
    index = full(1000)
    index._holders[500] = 0
    index.check_part(500)
    with pytest.raises(InvariantBroken, match="without holders"):
        index.check_part(1)


class Walked(dict):
    """Counts the keys that iterators pass."""

    walked = 0

    def __iter__(self):
        for key in super().__iter__():
            self.walked += 1
            yield key


def walked_by(index: PrefixIndex, keys: int) -> int:
    before = index._holders.walked
    index.check_part(keys)
    return index._holders.walked - before


def test_a_late_part_of_the_check_costs_as_much_as_the_first():
    index = full(10_000)
    index._holders = Walked(index._holders)
    assert [walked_by(index, 1000) for _ in range(10)] == [1000] * 10
    assert walked_by(index, 1000) == 1000, "it begins again"
    index.publish(0, whole=False, added=[10**6], removed=[])
    assert walked_by(index, 1000) == 1000, "a change does not make it walk over what was checked"


def test_a_wrong_entry_is_found_while_keys_come_and_go():
    index = full(10_000)
    index._holders[5000] = 2  # of no instance

    def come_and_go() -> None:
        for key in range(10_000):
            index.publish(0, whole=False, added=[10**6 + key], removed=[key] if key != 5000 else [])
            index.check_part(100)

    with pytest.raises(InvariantBroken, match="holder"):
        come_and_go()


def test_an_idle_router_checks_its_index_in_parts_and_begins_again():
    room = Room(config=RouterConfig(prefix_keys_max=10**5))
    liar, index = room.join(publishing()), room.router.membership.index
    for begin in range(0, 3 * CHECK_KEYS, CACHED_KEYS_MAX):
        room.say(liar, CachedKeys(added=b"".join(key.to_bytes(KEY_BYTES) for key in range(begin, begin + CACHED_KEYS_MAX))))
    index._holders, index._unchecked = Walked(index._holders), iter(())
    parts = []
    for _ in range(4):
        before = index._holders.walked
        room.router.check_part()
        parts.append(index._holders.walked - before)
    assert parts == [CHECK_KEYS] * 4
    assert next(index._unchecked) == CHECK_KEYS, "the fourth part is the first one again"


# The rate of digests


def test_an_instance_that_publishes_ten_million_keys_at_once_loses_its_session():
    """2,442 messages with one heartbeat. The other instance answers, and what the liar had is computed there."""
    room = Room("mixed", blocks=400, config=RouterConfig(prefix_keys_max=10_000))
    liar = room.join(publishing())
    room.arrive(request("a", tokens=64))
    room.arrive(request("b", tokens=60))
    message = CachedKeys(added=b"".join(key.to_bytes(KEY_BYTES) for key in range(CACHED_KEYS_MAX)))
    taken = 0
    for number in range(10**7 // CACHED_KEYS_MAX):
        if liar.session not in room.live:
            break
        room.say(liar, message)
        taken = number
    assert taken < 40
    assert "more than 2 times per heartbeat" in room.hung_up[liar.session]
    assert room.router.stats.losses["digests"] == 1
    room.run()
    room.assert_right("a")
    room.assert_right("b")


def test_heartbeats_between_its_messages_earn_an_instance_nothing():
    room = Room("mixed", blocks=400)
    liar = room.join(publishing())
    for _ in range(40):
        if liar.session in room.live:
            room.say(liar, Heartbeat(blocks_available=400, slots_free=8))
            room.say(liar, CachedKeys(added=bytes(KEY_BYTES)))
    assert liar.session in room.hung_up


def test_an_honest_instance_never_sends_too_many_keys():
    """A snapshot of 20,000 keys in small messages, and changes all the time. Heartbeats are a little early, and sometimes the
    connection is stalled for as long as a session may live: what has gathered arrives at once."""
    config = RouterConfig(prefix_keys_max=10**6)
    room, digest = Room(config=config), CacheDigest(KVConfig().digest_changes_max)
    instance = room.join(publishing())
    for key in range(20_000):
        digest.add(BlockKey(key.to_bytes(KEY_BYTES)))
    feed, sent, gathered = DigestFeed(digest), 0, []
    for beat in range(180):
        for key in range(beat * 100, beat * 100 + 100):
            digest.remove(BlockKey(key.to_bytes(KEY_BYTES)), 1)
            digest.add(BlockKey((10**6 + key).to_bytes(KEY_BYTES)))
        if (message := feed.next(256)) is not None:
            gathered.append(message)
        room.now += 0.9 * config.beat_seconds
        room.router.handle(InstanceMessage(instance.session, Heartbeat()), Instant(room.now))
        if beat % 60 < 50 or len(gathered) > config.lapse_seconds / config.beat_seconds:
            for each in gathered:
                room.router.handle(InstanceMessage(instance.session, each), Instant(room.now))
            sent += len(gathered)
            gathered = []
    assert sent > 150
    assert instance.session in room.router.membership.instances


def test_keys_of_an_instance_that_did_not_announce_them_end_its_session():
    room = Room("mixed", blocks=400)
    silent = room.join(Scripted(hello("silent")))
    room.say(silent, CachedKeys(added=packed(chain("a", 8))))
    assert "does not list the capability cached_keys" in room.hung_up[silent.session]
    assert len(room.router.membership.index) == 0
    listed = room.join(Scripted(replace(hello("listed"), capabilities=(CACHED_KEYS,))))
    room.say(listed, CachedKeys(added=packed(chain("a", 8))))
    assert listed.session in room.live
