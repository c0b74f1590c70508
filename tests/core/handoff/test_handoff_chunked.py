"""A prefill instance computes a prompt that it hands over in small chunks while nothing else waits: little is left to copy."""

from __future__ import annotations

from itertools import pairwise

from baton.protocol.handoff import Offer
from baton.protocol.ids import RequestId

from .test_handoff_source import Prefiller, marks

LONG = tuple(3 + number % 40 for number in range(64))


def prefiller(**settings) -> Prefiller:
    """Steps of all sizes take the same time per token."""
    node = Prefiller(
        **({"chunk_tokens_max": None, "tokens_per_step": 64, "handoff_chunk_tokens_min": 4, "blocks": 200} | settings)
    )
    for tokens in (4, 8, 16, 32, 64):
        node.instance._pace.chunks.step_done(tokens, 1e-3 * tokens)
    return node


def chunks(offers: list[Offer]) -> list[int]:
    """Tokens that each offer adds."""
    upto = [0, *(offer.tokens for offer in offers)]
    return [after - before for before, after in pairwise(upto)]


def test_a_prompt_alone_is_offered_in_eighths():
    node = prefiller()
    node.prefill(prompt=LONG)
    node.run()
    offers = node.take(Offer)
    assert chunks(offers) == [8] * 8
    assert node.content(offers) == marks(LONG)
    assert node.ask() is True


def test_beside_another_prompt_the_whole_step_is_used():
    """Otherwise both would share every step, and the first would be late."""
    node = prefiller(tokens_per_step=128)
    node.prefill("a", prompt=LONG)
    node.prefill("b", prompt=tuple(reversed(LONG)))
    node.run()
    offers = node.take(Offer)
    assert chunks([one for one in offers if one.request == "a"]) == [8, 56], "it was alone when it began"
    assert chunks([one for one in offers if one.request == "b"]) == [64]
    assert node.ask("a") is node.ask("b") is True


def test_a_prompt_that_is_not_handed_over_is_computed_as_ever():
    node = prefiller()
    node.submit("a", LONG, max_tokens=1)
    node.run()
    assert node.instance.stats.steps <= 3
    assert not node.take(Offer)
    assert RequestId("a") not in node.kept
