"""The check of an idle engine: a part of the blocks at a time, all of them in turn."""

from __future__ import annotations

import pytest

from baton.errors import InvariantBroken

from .tiered import TieredDriver


def idle() -> TieredDriver:
    driver = TieredDriver(blocks=32, host_blocks=40)
    for number in range(4):
        driver.submit(f"r{number}", range(100 * number, 100 * number + 21), max_tokens=3)
        driver.settle()
    driver.assert_at_rest()
    return driver


def test_every_block_is_checked_in_turn():
    driver = idle()
    seen: list[tuple[int, int]] = []
    cache = driver.instance.board.cache
    kept = type(cache).check_part

    class Watched(type(cache)):
        __slots__ = ()

        def check_part(self, begin: int, end: int) -> None:
            seen.append((begin, end))
            kept(self, begin, end)

    driver.instance.board.cache.__class__ = Watched
    for _ in range(6):
        driver.instance.check_part(16)
    assert seen == [(0, 16), (16, 32), (32, 48), (0, 16), (16, 32), (32, 48)]


def check_all(driver: TieredDriver) -> None:
    for _ in range(4):
        driver.instance.check_part(16)


def leak(driver: TieredDriver) -> None:
    driver.pool._requests[3] += 1
    driver.pool._idle -= driver.pool._cached[3]


def forget_a_host_block(driver: TieredDriver) -> None:
    driver.tiers.host._free.pop()


def pin_a_host_block(driver: TieredDriver) -> None:
    driver.tiers.host._pins[39] += 1


def lose_a_pending_move(driver: TieredDriver) -> None:
    driver.tiers._storing += 1


@pytest.mark.parametrize("break_it", [leak, forget_a_host_block, pin_a_host_block, lose_a_pending_move])
def test_what_leaked_is_found_within_one_round(break_it):
    driver = idle()
    break_it(driver)
    with pytest.raises(InvariantBroken):
        check_all(driver)
