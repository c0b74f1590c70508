"""A pool whose worker broke the protocol: no block of it is copied, found, published or offered until the next worker."""

from __future__ import annotations

import pytest

from baton.core.events import Submit
from baton.core.kv.pool_trust import NO_POOL, PoolTrust
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, Reserved
from baton.protocol.ids import PoolIncarnation

from ..handoff.test_handoff_destination import PROMPT, Decoder, handed
from .harness import make_request
from .tiered import TieredDriver

CHAT = range(1, 22)  # five whole blocks of four, and a token


def break_protocol(driver: TieredDriver) -> None:
    """The worker wrote through a wrong table before it was found out: every block holds something else."""
    for place in driver.worker.memory:
        driver.worker.memory[place] = 9_999
    driver.lose_worker("protocol")


@pytest.mark.parametrize("pool_kept", [True, False])
def test_a_copy_that_is_released_after_the_worker_broke_the_protocol_is_not_believed(pool_kept: bool):
    node = handed(host_blocks=16)
    break_protocol(node)
    assert [message.tokens for message in node.take(Adopted)] == [0], "the reservation is given up at once"
    node.release()
    assert not node.told, "no block of the pool goes to the host"
    node.restart_worker(pool_kept=pool_kept)
    node.goes_on()


def test_a_prompt_that_is_offered_after_the_worker_broke_the_protocol_is_computed():
    node = Decoder(host_blocks=16)
    node.expect()
    node.offer(0, 2)
    node.all_pulled()
    break_protocol(node)
    assert not node.held, "the reservation gives its blocks back"
    node.offer(2, 4, last=True)
    assert not node.told
    assert [message.tokens for message in node.take(Adopted)] == [0]
    node.restart_worker(pool_kept=True)
    node.goes_on()


def test_a_reservation_of_before_the_next_worker_finds_nothing_in_the_pool():
    """With write=selective a block that is found again is copied to the host."""
    node = Decoder(host_blocks=16, write="selective", write_hits=1)
    node.dispatch(Submit(make_request("first", PROMPT, max_tokens=2)))
    node.settle()
    node.said.clear()
    break_protocol(node)
    node.expect()
    assert [message.cached_tokens for message in node.take(Reserved)] == [0]
    assert not node.told
    node.restart_worker(pool_kept=True)
    node.offer(0, 4, last=True)
    node.settle()
    assert not len(node.tiers.host)
    node.goes_on()


@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_no_store_leaves_a_pool_that_is_not_trusted(write: str):
    """However a block was chosen: the question is asked where stores are made."""
    driver = TieredDriver(write=write, watermark=1.0, blocks=32)
    driver.submit("first", CHAT, max_tokens=1)
    driver.settle()
    break_protocol(driver)
    key, block = next(iter(driver.instance.board.cache.index().items()))
    driver.tiers.writes._want(key, block, False)
    driver.tiers.flush(driver.now)
    assert not driver.tiers.outgoing
    assert not driver.tiers.writes.to_store


def test_nothing_is_published_in_a_pool_that_is_not_trusted():
    driver = TieredDriver()
    driver.submit("first", CHAT, max_tokens=20)
    driver.step()
    sequence = driver.sequence("first")
    driver.instance.board.pool.lose()
    with pytest.raises(InvariantBroken, match="not trusted"):
        driver.instance.board.publish(sequence, sequence.published)


def test_a_pool_is_the_same_only_while_it_is_trusted():
    pool = PoolTrust()
    assert not pool.is_still(NO_POOL), "before the first worker there is none"
    pool.begin(PoolIncarnation(3))
    assert pool.is_still(PoolIncarnation(3))
    assert not pool.is_still(PoolIncarnation(4))
    assert pool.offered == 3
    pool.lose()
    assert not pool.is_still(PoolIncarnation(3))
    assert pool.offered == NO_POOL
    assert repr(pool) == "<PoolTrust 3, not trusted>"
