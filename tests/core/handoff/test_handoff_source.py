"""The prefill end of a hand-off: what is offered is there, and stays there, or its release is refused."""

from typing import Any

import pytest

from baton.core.effects import Mode, Refuse
from baton.core.events import Abort, EvictSome, ForgetCache, Pause, StepDone, Submit
from baton.protocol.handoff import Forget, Offer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.step import RowFailure

from ..engine.harness import MARKS, fold, freeze, make_request, mark, stop_at
from ..engine.pair import Node

KEEP = 30.0
PROMPT = tuple(range(3, 17))  # 14 tokens: three full blocks of four, and half of one
A = RequestId("a")


class Prefiller(Node):
    """An instance that is asked for prompts; the test is the router."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("prefill", **({"chunk_tokens_max": 4, "steps_in_flight": 1} | settings))

    def prefill(self, name: str = "a", prompt: tuple[int, ...] = PROMPT, keep: float = KEEP, **given: Any) -> list[Any]:
        outputs = given.get("outputs", ((),))
        sampling = {"max_tokens": len(outputs[0]) + 1}
        return self.dispatch(Prefill(make_request(name, prompt, **(sampling | given)), keep))

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.said if isinstance(message, kind)]
        for message in found:
            self.said.remove(message)
        return found

    def ends(self) -> list[Ended]:
        return [end for message in self.said if isinstance(message, Emit) for end in message.ended]

    def ask(self, name: str = "a", attempt: int = 1) -> bool:
        self.dispatch(Release(RequestId(name), attempt))
        (released,) = self.take(Released)
        assert (released.request, released.attempt) == (name, attempt)
        return bool(released.kept)

    def content(self, offers: list[Offer]) -> list[int]:
        """What somebody who copies the offered blocks now gets, position by position."""
        blocks = [block for offer in offers for block in offer.blocks]
        size = self.config.kv.block_size
        tokens = offers[-1].tokens
        return [self.worker.memory[blocks[place // size], place % size] for place in range(tokens)]

    @property
    def kept(self) -> Any:
        return self.instance.board.kept


def marks(tokens: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for token in tokens:
        found.append(mark(fold(found), token))
    assert max(found) < MARKS
    return found


def prefilled(**given: Any) -> Prefiller:
    node = Prefiller()
    node.prefill(**given)
    node.run()
    return node


def test_each_chunk_is_offered_when_it_is_computed():
    node = Prefiller()
    node.prefill()
    offers = []
    for computed in (4, 8, 12):
        node.step()
        (offer,) = node.take(Offer)
        assert (offer.place, len(offer.blocks), offer.tokens, offer.last) == (computed // 4 - 1, 1, computed, False)
        assert offer.pool == node.pool_incarnation
        offers.append(offer)
    node.step()
    emit, offer = node.said
    assert [row[:4] for row in emit.tokens] == [("a", 1, 0, 0)]
    assert not emit.ended
    assert (offer.place, len(offer.blocks), offer.tokens, offer.last) == (3, 1, 14, True)
    assert node.content([*offers, offer]) == marks(PROMPT)
    assert not node.instance.board.groups
    assert node.ask() is True
    node.run()
    node.said.clear()
    node.assert_at_rest()


def test_what_is_cached_is_offered_at_admission():
    node = prefilled()
    node.ask()
    node.said.clear()
    node.prefill("b")
    first = node.take(Offer)
    assert [(offer.place, len(offer.blocks), offer.tokens) for offer in first] == [(0, 3, 12)]
    node.run()
    last = node.take(Offer)
    assert [(offer.cached_tokens, offer.last) for offer in last] == [(12, True)]
    assert node.content([*first, *last]) == marks(PROMPT)
    assert node.ask("b") is True


def test_a_stop_is_an_ordinary_end():
    node = prefilled(stop_token_ids=(stop_at(0, PROMPT),))
    assert [end.reason.value for end in node.ends()] == ["stop"]
    assert not [offer for offer in node.take(Offer) if offer.last]
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_a_row_that_fails_is_an_ordinary_end():
    node = Prefiller()
    node.prefill()
    node.step()
    result = node.execute()
    node.results.clear()
    failed = type(result).of(result.step, result.epoch, [(0, 1, ())], failures=(RowFailure(0, 1, "NaN"),))
    node.dispatch(StepDone(failed))
    assert [end.error for end in node.ends()] == ["row_failed"]
    node.run()
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_time_of_the_request_is_up():
    node = Prefiller(step_seconds_max=1000.0)
    node.prefill(timeout_seconds=5.0)
    node.step()
    node.advance(6.0)
    assert [end.reason.value for end in node.ends()] == ["timeout"]
    node.run()
    node.said.clear()
    node.assert_at_rest()


def test_a_replay_offers_what_was_delivered_too():
    node = prefilled()
    token = next(message for message in node.said if isinstance(message, Emit)).tokens[0][4]
    node.said.clear()
    node.prefill(outputs=((token,),), attempt=2)
    node.run()
    offers = node.take(Offer)
    assert offers[-1].tokens == 15
    assert node.content(offers) == marks((*PROMPT, token))
    assert node.ask(attempt=1) is False
    assert node.ask(attempt=2) is True


# The lease


def test_the_lease_has_an_end():
    node = prefilled()
    assert node.instance.next_deadline() == KEEP
    node.advance(KEEP - 1.0)
    assert node.kept
    node.advance(1.0)
    node.said.clear()
    node.assert_at_rest()
    assert node.ask() is False


def test_it_is_released_once():
    node = prefilled()
    assert node.ask() is True
    assert node.ask() is False
    assert node.instance.stats.not_kept == 1


def test_a_release_that_comes_too_early_changes_nothing():
    node = Prefiller()
    node.prefill()
    node.step()
    assert node.ask() is False
    assert node.ask(attempt=2) is False
    node.run()
    assert node.take(Offer)[-1].last
    assert node.ask(attempt=2) is False
    assert node.ask() is True


def test_pressure_on_the_cache_does_not_touch_it():
    node = prefilled()
    node.dispatch(ForgetCache(1))
    node.dispatch(EvictSome(100))
    offers = node.take(Offer)
    assert node.content(offers) == marks(PROMPT)
    assert node.ask() is True
    node.dispatch(ForgetCache(2))
    assert node.pool.free == node.pool.total


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_preempted_in_the_middle_of_a_prompt(prompt_logprobs):
    node = Prefiller()
    node.prefill(prompt_logprobs=prompt_logprobs)
    node.step(2)
    offers = node.take(Offer)
    node.preempt()
    assert node.pool.total - node.pool.free - node.pool.idle == 2, "what was offered is still held"
    node.dispatch(EvictSome(100))
    node.run()
    offers += node.take(Offer)
    assert [offer.place for offer in offers] == [0, 1, 2, 3]
    assert node.content(offers) == marks(PROMPT)
    assert node.ask() is True


def test_preempted_with_its_token_in_flight():
    """The half block is gone with the preemption; the full ones were offered, and stay."""
    node = Prefiller()
    node.prefill()
    node.step(3)
    node.execute()
    node.preempt()
    node.deliver()
    offers = node.take(Offer)
    assert (offers[-1].last, offers[-1].blocks, offers[-1].tokens) == (True, (), 12)
    assert node.content(offers) == marks(PROMPT)[:12]
    node.run()
    assert node.ask() is True
    node.said.clear()
    node.assert_at_rest()


def test_a_token_in_flight_when_nothing_was_offered_yet():
    node = Prefiller(chunk_tokens_max=64)
    node.prefill()
    node.execute()
    node.preempt()
    node.deliver()
    (offer,) = node.take(Offer)
    assert (offer.last, offer.blocks, offer.tokens) == (True, (), 0)
    node.run()
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_the_growth_reserve_learns_nothing_from_it():
    """It had the one token that was asked for: that says nothing about answers."""
    node = Prefiller(reserve_start=0.5, reserve_learning=0.5)
    node.prefill()
    node.run()
    assert node.instance.board.reserve.ratio == 0.5


# The pool


def test_another_pool_makes_it_void_and_the_last_offer_says_so():
    node = Prefiller()
    node.prefill()
    node.step(2)
    node.lose_worker("killed")
    assert node.kept
    node.restart_worker(pool_kept=False)
    node.run()
    (last,) = [offer for offer in node.take(Offer) if offer.last]
    assert (last.blocks, last.tokens) == ((), 0)
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


@pytest.mark.parametrize("when", [2, 9])
def test_the_same_pool_keeps_it(when):
    node = Prefiller()
    node.prefill()
    for _ in range(when):
        if node.plans:
            node.step()
    node.lose_worker("killed")
    node.restart_worker(pool_kept=True)
    node.run()
    offers = node.take(Offer)
    assert node.content(offers) == marks(PROMPT)
    assert node.ask() is True


@pytest.mark.parametrize("when", [2, 9])
def test_a_pool_that_is_not_to_be_trusted_makes_it_void_at_once(when):
    node = Prefiller()
    node.prefill()
    for _ in range(when):
        if node.plans:
            node.step()
    node.lose_worker("protocol")
    assert node.ask() is False
    node.restart_worker(pool_kept=True)
    node.run()
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_other_weights_make_it_void():
    node = prefilled()
    node.lose_worker("killed")
    node.restart_worker(pool_kept=True, fingerprint=b"other")
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_a_suspect_that_is_held_keeps_nothing():
    """Those that it is held for may need its blocks."""
    node = Prefiller(slots=4, tokens_per_step=16)
    node.prefill("a")
    node.prefill("b", tuple(range(40, 56)))
    node.step(2)
    assert all(kept.blocks for kept in node.kept.values())
    node.lose_worker("died")
    assert [bool(kept.blocks) for kept in node.kept.values()] == [True, False]
    node.restart_worker(pool_kept=True)
    node.run()
    lasts = {offer.request: offer.tokens for offer in node.take(Offer) if offer.last}
    assert lasts == {"a": 14, "b": 0}
    assert node.ask("a") is True
    assert node.ask("b") is False
    node.said.clear()
    node.assert_at_rest()


# Blocks are short


def test_growth_takes_what_is_kept_before_it_preempts():
    node = Prefiller(blocks=8, steps_in_flight=2)
    node.dispatch(Submit(make_request("long", (1, 2, 3), max_tokens=20)))
    node.prefill()
    node.run()
    assert node.instance.stats.preemptions == 0
    assert [end.request for end in node.ends()] == ["long"]
    assert node.ask() is False
    node.said.clear()
    node.assert_at_rest()


def test_a_younger_request_waits_until_it_is_released():
    node = Prefiller(blocks=6)
    node.prefill()
    node.run()
    node.prefill("b", tuple(range(40, 52)))
    assert not node.plans
    assert node.ask() is True
    assert node.plans
    node.run()
    assert node.ask("b") is True


def test_a_younger_request_waits_until_it_lapses():
    node = Prefiller(blocks=6)
    node.prefill(keep=5.0)
    node.run()
    node.prefill("b", tuple(range(40, 52)))
    assert not node.plans
    node.advance(5.0)
    assert node.plans


def test_an_older_request_does_not_wait_for_what_a_younger_one_keeps():
    node = Prefiller(blocks=6)
    node.now = 10.0
    node.prefill()
    node.run()
    node.prefill("old", tuple(range(40, 52)), age_seconds=9.0, attempt=2)
    assert node.plans
    assert node.ask() is False
    node.run()
    assert node.ask("old", 2) is True


def test_what_two_keep_is_held_until_both_are_released():
    node = prefilled()
    node.prefill("b")
    node.run()
    assert node.ask() is True
    node.dispatch(EvictSome(100))
    offers = [offer for offer in node.take(Offer) if offer.request == "b"]
    assert node.content(offers) == marks(PROMPT)
    assert node.ask("b") is True


def test_their_number_has_a_bound():
    node = Prefiller(kept_max=2)
    for name in "abc":
        node.prefill(name, tuple(range(ord(name), ord(name) + 5)))
        node.run()
    assert [node.ask(name) for name in "abc"] == [False, True, True]


# Ends from outside


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_abort_drops_everything(steps):
    node = Prefiller()
    node.prefill()
    node.step(steps)
    node.dispatch(Abort(A))
    assert node.ask() is False
    assert [end.reason.value for end in node.ends()] == (["abort"] if steps < 4 else [])
    node.run()
    node.said.clear()
    node.assert_at_rest()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_forget_drops_everything_and_nobody_hears_of_it(steps):
    node = Prefiller()
    node.prefill()
    node.step(steps)
    node.said.clear()
    node.dispatch(Forget(A, 1))
    node.run()
    assert not node.said
    node.assert_at_rest()
    node.prefill()
    assert [refuse.refused.reason for refuse in node.take(Refuse)] == ["duplicate_id"], "that attempt is closed"
    node.assert_at_rest()


def test_forget_of_a_lower_attempt_changes_nothing():
    node = Prefiller()
    node.prefill(attempt=2)
    node.step(2)
    node.dispatch(Forget(A, 1))
    node.run()
    assert node.ask(attempt=2) is True


def test_forget_of_the_unknown_changes_nothing_but_the_memory():
    node = Prefiller()
    node.dispatch(Forget(A, 3))
    node.prefill(attempt=3)
    (refuse,) = node.take(Refuse)
    assert (refuse.refused.reason, refuse.attempt) == ("duplicate_id", 3)
    node.prefill(attempt=4)
    node.run()
    assert node.ask(attempt=4) is True


def test_said_twice_it_is_done_once():
    node = Prefiller()
    node.prefill()
    for _ in range(5):
        before = freeze(node.instance)
        assert node.prefill() == []
        assert freeze(node.instance) == before
        if node.plans:
            node.step()
    assert node.ask() is True
    node.prefill()
    assert [refuse.refused.reason for refuse in node.take(Refuse)] == ["duplicate_id"]


@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("kind", ["submit", "prefill", "expect"])
def test_a_higher_attempt_ends_a_lower_one_silently(kind, steps):
    node = Prefiller()
    node.prefill()
    node.step(steps)
    node.said.clear()
    request = make_request("a", PROMPT, max_tokens=1, attempt=2)
    node.dispatch({"submit": Submit(request), "prefill": Prefill(request, KEEP), "expect": Reserve(request, KEEP)}[kind])
    assert node.ask(attempt=1) is False
    node.run()
    if kind == "submit":
        assert [(end.attempt, end.reason.value) for end in node.ends()] == [(2, "length")]
    elif kind == "prefill":
        assert node.ask(attempt=2) is True
    else:
        assert node.take(Reserved)
        node.dispatch(Forget(A, 2))
    assert not [end for end in node.ends() if end.attempt == 1]
    node.run()
    node.said.clear()
    node.assert_at_rest()


@pytest.mark.parametrize("kind", ["submit", "prefill", "expect"])
def test_a_lower_attempt_is_refused(kind):
    node = prefilled(attempt=2)
    request = make_request("a", PROMPT, max_tokens=1, attempt=1)
    node.dispatch({"submit": Submit(request), "prefill": Prefill(request, KEEP), "expect": Reserve(request, KEEP)}[kind])
    assert [refuse.refused.reason for refuse in node.take(Refuse)] == ["duplicate_id"]
    assert node.ask(attempt=2) is True


def test_the_memory_of_attempts_has_a_bound():
    node = Prefiller(attempts_max=3)
    for number in range(10):
        node.dispatch(Forget(RequestId(f"r{number}"), 1))
    assert list(node.instance._handoff._attempts) == ["r7", "r8", "r9"]


# Pause


def test_a_drain_waits_for_what_is_kept_and_not_longer():
    node = prefilled(keep=5.0)
    node.dispatch(Pause())
    assert node.modes == [Mode.DRAINING]
    node.prefill("b")
    assert [refuse.refused.reason for refuse in node.take(Refuse)] == ["draining"]
    node.advance(4.0)
    assert node.modes == [Mode.DRAINING]
    node.advance(1.0)
    assert node.modes == [Mode.DRAINING, Mode.PAUSED]


def test_a_drain_ends_with_the_release():
    node = prefilled()
    node.dispatch(Pause())
    assert node.ask() is True
    assert node.modes == [Mode.DRAINING, Mode.PAUSED]


def test_a_drain_that_has_no_time_left_gives_it_up():
    node = prefilled()
    node.dispatch(Pause(drain_seconds_max=1.0))
    node.advance(1.0)
    assert node.modes == [Mode.DRAINING, Mode.PAUSED]
    assert node.ask() is False


def test_loaded_blocks_are_offered_too():
    node = Prefiller(host_blocks=16)
    node.prefill()
    node.settle()
    node.ask()
    node.forget_device()
    node.settle()
    node.said.clear()
    node.prefill("b")
    assert node.kinds == ["load"]
    node.carry_out()
    node.settle()
    offers = node.take(Offer)
    assert [(offer.place, offer.tokens) for offer in offers] == [(0, 12), (3, 14)]
    assert (offers[-1].cached_tokens, offers[-1].host_tokens) == (12, 12)
    assert node.content(offers) == marks(PROMPT)
    assert node.ask("b") is True
