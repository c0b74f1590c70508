"""The pool against a model that keeps, for each block, the list of its holders."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.kv.block_pool import BlockPool
from baton.errors import InvariantBroken


class Holders:
    """The naive pool: every question is answered by looking at everything."""

    def __init__(self, total: int) -> None:
        self.of: dict[int, list[str]] = {block: [] for block in range(total)}
        self.taken: dict[int, int] = dict.fromkeys(range(total), 0)

    def those(self, *kinds: str) -> list[int]:
        """Blocks that are held, and by these kinds of holder alone."""
        return [block for block, held in self.of.items() if held and all(one in kinds for one in held)]

    def held_by(self, kind: str) -> list[int]:
        return [block for block, held in self.of.items() if kind in held]

    @property
    def free(self) -> list[int]:
        return [block for block, held in self.of.items() if not held]

    def drop(self, block: int, kind: str) -> bool:
        """Says whether only the cache holds it now."""
        self.of[block].remove(kind)
        return self.of[block] == ["cache"]


some = st.integers(0, 1000)


class PoolAgainstModel(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 12))
    def start(self, total):
        self.pool, self.model = BlockPool(total), Holders(total)

    def pick(self, blocks, number):
        return blocks[number % len(blocks)]

    @rule(count=st.integers(0, 14))
    def take(self, count):
        if count > len(self.model.free):
            before = list(self.model.free)
            with pytest.raises(InvariantBroken):
                self.pool.take(count)
            assert self.pool.free == len(before), "all or nothing"
            return
        taken = self.pool.take(count)
        assert len(taken) == len({*taken}) == count
        for block in taken:
            assert block in self.model.free
            self.model.of[block].append("request")
            self.model.taken[block] += 1

    @precondition(lambda self: self.model.held_by("request") or self.model.held_by("cache"))
    @rule(number=some)
    def share(self, number):
        block = self.pick(sorted({*self.model.held_by("request"), *self.model.held_by("cache")}), number)
        self.pool.share([block])
        self.model.of[block].append("request")

    @precondition(lambda self: self.model.held_by("request"))
    @rule(number=some)
    def give_back(self, number):
        block = self.pick(self.model.held_by("request"), number)
        idle = self.pool.give_back([block])
        assert idle == ([block] if self.model.drop(block, "request") else [])

    @precondition(lambda self: len(self.model.free) < self.pool.total)
    @rule(number=some)
    def pin(self, number):
        block = self.pick([block for block, held in self.model.of.items() if held], number)
        self.pool.pin([block])
        self.model.of[block].append("move")

    @precondition(lambda self: self.model.held_by("move"))
    @rule(number=some)
    def unpin(self, number):
        block = self.pick(self.model.held_by("move"), number)
        idle = self.pool.unpin([block])
        assert idle == ([block] if self.model.drop(block, "move") else [])

    @precondition(lambda self: [b for b in self.model.held_by("request") if "cache" not in self.model.of[b]])
    @rule(number=some)
    def cache(self, number):
        block = self.pick([b for b in self.model.held_by("request") if "cache" not in self.model.of[b]], number)
        self.pool.cache(block)
        self.model.of[block].append("cache")

    @precondition(lambda self: self.model.those("cache"))
    @rule(number=some)
    def uncache(self, number):
        block = self.pick(self.model.those("cache"), number)
        self.pool.uncache(block)
        self.model.of[block].remove("cache")

    @rule(number=some)
    def misuse(self, number):
        """Whatever is not allowed for this block raises, and changes nothing."""
        block = number % self.pool.total
        held = self.model.of[block]
        forbidden = {
            self.pool.share: "request" not in held and "cache" not in held,
            self.pool.give_back: "request" not in held,
            self.pool.pin: not held,
            self.pool.unpin: "move" not in held,
        }
        for operation, is_wrong in forbidden.items():
            if is_wrong:
                with pytest.raises(InvariantBroken):
                    operation([block])
        if "cache" in held or "request" not in held:
            with pytest.raises(InvariantBroken):
                self.pool.cache(block)
        if held != ["cache"]:
            with pytest.raises(InvariantBroken):
                self.pool.uncache(block)

    @invariant()
    def agree(self):
        if not hasattr(self, "pool"):
            return
        held = {block: one.count("request") for block, one in self.model.of.items()}
        self.pool.check(held)
        assert self.pool.free == len(self.model.free)
        assert self.pool.idle == len(self.model.those("cache"))
        for block, one in self.model.of.items():
            assert self.pool.is_idle(block) == (one == ["cache"])
            assert self.pool.is_cached(block) == ("cache" in one)
            assert self.pool.is_pinned(block) == ("move" in one)
            assert self.pool.request_references(block) == one.count("request")
            assert self.pool.generation(block) == self.model.taken[block], "grows each time it leaves `free`"


PoolAgainstModel.TestCase.settings = settings(stateful_step_count=40)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_double_give_back_raises():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(InvariantBroken) as raised:
        pool.give_back(blocks)
    assert raised.value.invariant == 2


def test_eviction_of_a_held_block_raises():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.cache(block)
    with pytest.raises(InvariantBroken) as raised:
        pool.uncache(block)
    assert raised.value.invariant == 15


def test_unpin_without_a_pin_raises():
    pool = BlockPool(4)
    with pytest.raises(InvariantBroken):
        pool.unpin(pool.take(1))


def test_pin_keeps_a_block_that_everybody_else_let_go():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.cache(blocks[0])
    pool.pin(blocks)
    assert pool.give_back(blocks) == []
    assert (pool.free, pool.idle) == (2, 0)
    assert pool.unpin(blocks) == [blocks[0]]
    assert (pool.free, pool.idle) == (3, 1)


def test_check_finds_a_table_that_names_a_block_without_a_reference():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.check({block: 1})
    with pytest.raises(InvariantBroken):
        pool.check({block: 2})
    with pytest.raises(InvariantBroken):
        pool.check({})


def test_repr_is_a_dashboard():
    pool = BlockPool(8)
    blocks = pool.take(3)
    pool.cache(blocks[0])
    pool.give_back(blocks[:1])
    assert repr(pool) == "<BlockPool 8: 5 free, 1 cached, 2 held>"
