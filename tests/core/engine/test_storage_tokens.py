"""Storage that finds blocks by token ids: it is told those that keys stand for, whatever has happened to the blocks since."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.events import CacheReady
from baton.protocol.moves import BlockMove, StorageQuery, unpack_tokens

from .tiered import TieredDriver

PROMPT = range(1, 22)  # five whole blocks of four, and a token
WHOLE = tuple(range(1, 21))


class ByTokens(TieredDriver):
    """A storage that wants tokens, and checks what it gets."""

    def __init__(self, **settings) -> None:
        super().__init__(**{"storage": True, "host_blocks": 16, **settings})
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []
        self.dispatch(CacheReady(wants_tokens=True))

    def start_cache(self, *, kept: bool = True) -> None:
        self.dispatch(CacheReady(kept, wants_tokens=True))

    def on_cache_effect(self, effect: object) -> None:
        super().on_cache_effect(effect)
        message = self.told[-1] if self.told else None
        by_key = isinstance(message, StorageQuery) or (isinstance(message, BlockMove) and message.kind in ("put", "fetch"))
        if message is None or not hasattr(self, "seen"):
            return
        assert by_key or not message.tokens
        if by_key and self.tiers.links is not None:
            tokens, board = unpack_tokens(message.tokens), self.instance.board
            keys: list = []
            board.hasher.extend(keys, board.hasher.root(b""), tokens, len(tokens) // board.block_size)
            assert tuple(keys[-len(message.keys) :]) == message.keys
            kind = "query" if isinstance(message, StorageQuery) else message.kind
            self.seen.append((kind, len(message.keys), tokens))

    def seen_of(self, kind: str) -> list[tuple[int, tuple[int, ...]]]:
        return [(count, tokens) for what, count, tokens in self.seen if what == kind]


def answered(driver: ByTokens, request: str, prompt: Sequence[int] = PROMPT) -> None:
    driver.submit(request, prompt, max_tokens=3)
    driver.settle()


def test_nobody_is_told_tokens_who_does_not_ask():
    driver = TieredDriver(storage=True, host_blocks=16)
    driver.submit("first", PROMPT, max_tokens=3)
    while driver.told or driver.plans or driver.results:
        assert not any(message.tokens for message in driver.told)
        driver.step() if driver.plans or driver.results else driver.carry_out()
    assert driver.tiers.links is None
    assert driver.storage


def test_a_question_a_put_and_a_fetch_carry_the_whole_prefix():
    driver = ByTokens()
    answered(driver, "first")
    assert driver.seen_of("query") == [(5, WHOLE)]
    assert (5, WHOLE) in driver.seen_of("put")
    driver.lose_cache(kept=False)
    driver.forget_device()
    driver.start_cache(kept=False)
    answered(driver, "again")
    assert driver.seen_of("fetch") == [(5, WHOLE)]
    driver.assert_answered()


def test_a_run_that_begins_in_the_middle_names_what_is_before_it():
    """The device has the first three blocks; storage is asked for the rest."""
    driver = ByTokens()
    answered(driver, "first", range(1, 14))
    driver.seen.clear()
    answered(driver, "longer")
    assert driver.seen_of("query") == [(2, WHOLE)]
    assert driver.seen_of("put") == [(2, WHOLE)]


def test_two_sequences_are_put_apart():
    """They share two blocks; what differs goes in a run of its own."""
    driver = ByTokens(host_blocks=64)
    driver.submit("one", PROMPT, max_tokens=1)
    driver.submit("two", [*range(1, 9), *range(40, 53)], max_tokens=1)
    driver.settle()
    puts = driver.seen_of("put")
    assert sum(count for count, _ in puts) == 5 + 3
    assert {tokens for _, tokens in puts} >= {(*range(1, 9), *range(40, 52))}


def test_what_the_device_has_lost_is_put_by_what_the_host_knows():
    """Write back: blocks are put long after their request is gone, the last of a chain first."""
    driver = ByTokens(write="back", blocks=8, host_blocks=8, watermark=1.0)
    answered(driver, "first")
    answered(driver, "other", range(30, 51))
    answered(driver, "third", range(60, 81))
    assert any(tokens[0] == 1 for _, tokens in driver.seen_of("put"))


def test_links_stay_when_the_service_restarts_and_go_when_nobody_asks():
    driver = ByTokens()
    answered(driver, "first")
    links = driver.tiers.links
    driver.lose_cache()
    driver.start_cache()
    assert driver.tiers.links is links
    driver.lose_cache()
    driver.dispatch(CacheReady())
    assert driver.tiers.links is None


def test_what_follows_blocks_of_unknown_ids_is_not_put():
    """They were computed before the service said that it wants tokens."""
    driver = ByTokens()
    driver.lose_cache()
    driver.dispatch(CacheReady())
    answered(driver, "first", range(1, 14))
    driver.dispatch(CacheReady(wants_tokens=True))
    driver.seen.clear()
    skipped = driver.tiers.stats.skipped_puts
    answered(driver, "longer")
    assert driver.seen_of("put") == []
    assert driver.tiers.stats.skipped_puts > skipped
    driver.assert_answered()
