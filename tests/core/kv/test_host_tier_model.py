"""The host tier against a list that does the same naively; and what a copy costs, as measured."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.kv.host_tier import HostTier
from baton.core.kv.rates import BlockRate
from baton.errors import InvariantBroken


class Naive:
    """Keys in the order of their last use, with their pins."""

    def __init__(self, total: int) -> None:
        self.total, self.keys, self.pins, self.busy = total, [], {}, 0

    def take(self, count: int) -> int:
        while self.free < count:
            victim = next((key for key in self.keys if not self.pins.get(key)), None)
            if victim is None:
                break
            self.keys.remove(victim)
        taken = min(count, self.free)
        self.busy += taken
        return taken

    @property
    def free(self) -> int:
        return self.total - self.busy - len(self.keys)


@pytest.mark.parametrize("seed", range(40))
def test_it_does_what_a_list_does(seed: int):
    """20: the one used longest ago goes first. 10: every block is somewhere, once. 15: nothing that is read goes."""
    random, total = Random(seed), Random(seed).randint(1, 12)
    tier, naive = HostTier(total), Naive(total)
    writing: list[int] = []
    read: list[tuple[bytes, int, bool]] = []
    "Key, block, and whether the cache was cleared meanwhile."
    for _ in range(300):
        match random.choice(("take", "insert", "insert", "discard", "touch", "pin", "unpin", "clear")):
            case "take":
                count = random.randint(1, 3)
                taken = tier.take(count)
                assert len(taken) == naive.take(count)
                writing += taken
            case "insert" if writing:
                key = random.randbytes(1)[:1]
                block = writing.pop(random.randrange(len(writing)))
                tier.insert(key, block)
                naive.busy -= 1
                if key not in naive.keys:
                    naive.keys.append(key)
            case "discard" if writing:
                tier.discard(writing.pop())
                naive.busy -= 1
            case "touch" if naive.keys:
                some = random.sample(naive.keys, min(3, len(naive.keys)))
                tier.touch(some)
                for key in reversed(some):
                    naive.keys.remove(key)
                    naive.keys.append(key)
            case "pin" if naive.keys:
                key = random.choice(naive.keys)
                read.append((key, tier.pin([key])[0], False))
                naive.pins[key] = naive.pins.get(key, 0) + 1
            case "unpin" if read:
                key, block, orphan = read.pop(random.randrange(len(read)))
                tier.unpin([block])
                if not orphan:
                    naive.pins[key] -= 1
                elif all(other != block for _, other, _ in read):
                    naive.busy -= 1
            case "clear" if random.random() < 0.2:
                tier.forget()
                naive.busy += sum(count > 0 for count in naive.pins.values())
                naive.keys, naive.pins = [], {}
                read = [(key, block, True) for key, block, _ in read]
        assert list(tier.index()) == naive.keys
        assert tier.free == naive.free
        pins: dict[int, int] = {}
        for _, block, _ in read:
            pins[block] = pins.get(block, 0) + 1
        tier.check(pins, dict.fromkeys(writing, 1))


def test_a_run_ends_at_its_first_hole():
    tier = HostTier(4)
    for key in (b"a", b"b", b"d"):
        tier.insert(key, tier.take(1)[0])
    assert [tier.run([b"a", b"b", b"c", b"d"], start, 4) for start in range(4)] == [2, 1, 0, 1]


def test_what_a_move_reads_and_nobody_pinned_is_found_by_check():
    tier = HostTier(2)
    block = tier.take(1)[0]
    tier.insert(b"a", block)
    with pytest.raises(InvariantBroken, match="pins"):
        tier.check({block: 1}, {})
    with pytest.raises(InvariantBroken, match="without a pin"):
        tier.unpin([block])


# Rates


def test_a_rate_follows_what_is_measured_and_one_slow_move_is_not_the_rule():
    rate = BlockRate()
    assert rate.seconds is None
    rate.moved(10, 0.1)
    assert rate.seconds == pytest.approx(0.01)
    rate.moved(1, 10.0)  # a thousand times slower, once
    assert rate.seconds < 0.02
    for _ in range(40):
        rate.moved(1, 0.5)  # it stays slow
    assert rate.seconds == pytest.approx(0.5)
    for _ in range(40):
        rate.moved(1, 0.001)
    assert rate.seconds == pytest.approx(0.001)


def test_a_rate_is_a_quantile_above_the_median():
    rate, random = BlockRate(), Random(1)
    seen = []
    for _ in range(4000):
        rate.moved(1, random.uniform(1.0, 2.0))
        seen.append(rate.seconds)
    assert 1.5 < sum(seen[1000:]) / 3000 < 2.0


def test_a_move_that_brought_nothing_says_nothing_about_the_rate():
    rate = BlockRate()
    rate.moved(0, 1.0)
    rate.moved(3, 0.0)
    assert rate.seconds is None
