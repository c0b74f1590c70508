"""A hand-off between two real instances: whatever happens, the client has the tokens of an undisturbed run."""

from collections.abc import Callable
from random import Random

import pytest

from baton.core.events import Abort, EvictSome
from baton.protocol.ids import RequestId

from ..engine.harness import stop_at
from ..engine.pair import KEEP, LEASE, Pair

PROMPT = tuple(range(3, 17))  # 14 tokens: three full blocks of four, and half of one


def test_a_prompt_is_handed_over_and_computed_once():
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=9)
    pair.run()
    pair.assert_answered()
    assert routed.kept is True
    assert routed.adopted_tokens == len(PROMPT)
    assert [plan.tokens for plan in pair.decode.history if plan.tokens] == [1] * 8, "decode computes no prompt token"
    assert pair.prefill.tiers.stats.pulled == 0
    assert pair.decode.tiers.stats.pulled == 4
    pair.assert_at_rest()


@pytest.mark.parametrize("length", range(1, 14))
def test_every_length_of_prompt(length):
    pair = Pair(chunk_tokens_max=3)
    pair.start("a", PROMPT[:length], max_tokens=7)
    pair.run()
    pair.assert_answered()
    assert pair.routed_requests["a"].kept is True
    assert pair.routed_requests["a"].adopted_tokens == length
    pair.assert_at_rest()


def test_chunks_are_pulled_while_the_next_is_computed():
    pair = Pair(chunk_tokens_max=4, steps_in_flight=1)
    pair.start("a", PROMPT, max_tokens=4)
    pair.hear_all()
    pair.prefill.step()
    pair.hear_all()
    assert pair.decode.kinds == ["pull"]
    pair.decode.carry_out()
    assert pair.prefill.plans, "the next chunk is still to be computed"
    pair.run()
    pair.assert_answered()
    pair.assert_at_rest()


def test_what_decode_has_cached_is_not_pulled():
    pair = Pair()
    pair.start("a", PROMPT, max_tokens=3)
    pair.run()
    routed = pair.start("b", (*PROMPT, 50, 51, 52), max_tokens=3)
    pulled = pair.decode.tiers.stats.pulled
    pair.run()
    pair.assert_answered()
    assert pair.decode.tiers.stats.pulled - pulled == 2
    assert routed.kept is True
    assert routed.ended[0].cached_tokens == 12, "what was pulled is not what was cached"
    pair.assert_at_rest()


def test_a_stop_at_the_first_token_is_an_ordinary_end():
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=9, stop_token_ids=(stop_at(0, PROMPT),))
    pair.run()
    pair.assert_answered()
    assert len(routed.tokens[0]) == 1
    assert not pair.decode.history
    pair.assert_at_rest()


def test_a_stop_at_the_first_token_of_the_leader_leaves_the_others():
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=5, n=3, stop_token_ids=(stop_at(0, PROMPT),))
    pair.run()
    pair.assert_answered()
    assert routed.attempt == 2
    pair.assert_at_rest()


def test_siblings_start_from_the_leaders_prompt():
    pair = Pair(chunk_tokens_max=5)
    pair.start("a", PROMPT, max_tokens=5, n=3)
    pair.run()
    pair.assert_answered()
    assert len(pair.prefill.seated) == 1
    assert [new.computed_tokens for new in pair.decode.seated] == [14, 12, 12]
    pair.assert_at_rest()


def test_prompt_logprobs_are_told_by_prefill_and_only_there():
    pair = Pair(chunk_tokens_max=5)
    routed = pair.start("a", PROMPT, max_tokens=5, prompt_logprobs=0, logprobs=0)
    pair.run()
    pair.assert_answered()
    told = [token.token for row in routed.logprobs[0] for token in row.prompt]
    assert told == list(PROMPT)
    assert len([row for row in routed.logprobs[0] if row.sampled is not None]) == 5
    assert pair.decode.seated[0].computed_tokens == len(PROMPT)
    pair.assert_at_rest()


def test_a_replay_is_handed_over_with_what_was_delivered():
    pair = Pair(chunk_tokens_max=5)
    routed = pair.start("a", PROMPT, max_tokens=9)
    pair.run(until=lambda: len(routed.tokens[0]) == 4)
    pair.decode.lose_worker("killed")
    pair.replay("a")
    pair.decode.restart_worker()
    pair.run()
    pair.assert_answered()
    assert routed.kept is True
    pair.assert_at_rest()


def test_usage_of_the_prompt_is_that_of_prefill():
    pair = Pair()
    pair.start("a", PROMPT, max_tokens=3)
    pair.run()
    pair.decode.forget_device()
    routed = pair.start("b", (*PROMPT, 5), max_tokens=3)
    pair.run()
    assert routed.usage is not None
    assert routed.usage.cached_tokens == 12
    assert routed.ended[0].cached_tokens == 0
    pair.assert_at_rest()


@pytest.mark.parametrize("n", [1, 2])
def test_forgotten_at_every_point(n):
    """After each single thing that happens: Forget frees both sides, and the next attempt gives the rest."""
    for point in range(200):
        pair = Pair(chunk_tokens_max=5, blocks=24)
        routed = pair.start("a", PROMPT, max_tokens=4, n=n)
        ended = not all(pair.act() for _ in range(point))
        pair.forget("a")
        pair.replay("a")
        pair.run()
        pair.assert_answered()
        pair.assert_at_rest()
        if ended:
            return
        assert routed.attempt == 2
    raise AssertionError("it never ended")


def test_forgotten_and_not_asked_for_again_leaves_nothing():
    for point in range(200):
        pair = Pair(chunk_tokens_max=5)
        routed = pair.start("a", PROMPT, max_tokens=4)
        ended = not all(pair.act() for _ in range(point))
        pair.forget("a")
        routed.attempt += 1
        pair.run()
        pair.assert_at_rest()
        if ended:
            return
    raise AssertionError("it never ended")


def test_aborted_at_every_point():
    for point in range(200):
        pair = Pair(chunk_tokens_max=5)
        pair.start("a", PROMPT, max_tokens=4)
        ended = not all(pair.act() for _ in range(point))
        for node in (pair.prefill, pair.decode):
            node.dispatch(Abort(RequestId("a")))
        pair.routed_requests["a"].attempt += 1  # the router has told its client, and hears nothing more
        pair.run()
        pair.assert_at_rest()
        if ended:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_worker_lost_at_every_point(side, kept):
    """The pool outlives the worker, or it does not: the router need not even know."""
    for point in range(200):
        pair = Pair(chunk_tokens_max=5, steps_in_flight=2)
        pair.start("a", PROMPT, max_tokens=4, n=2)
        ended = not all(pair.act() for _ in range(point))
        node = getattr(pair, side)
        node.lose_worker("killed")
        pair.hear_all()
        node.restart_worker(pool_kept=kept)
        pair.run()
        pair.assert_answered()
        pair.assert_at_rest()
        if ended:
            return
    raise AssertionError("it never ended")


def test_worker_that_broke_the_protocol_at_every_point():
    for point in range(200):
        pair = Pair(chunk_tokens_max=5)
        pair.start("a", PROMPT, max_tokens=4)
        ended = not all(pair.act() for _ in range(point))
        for node in (pair.prefill, pair.decode):
            node.lose_worker("protocol")
            node.worker.memory.clear()
            pair.hear_all()
            node.restart_worker(pool_kept=True)
        pair.run()
        pair.assert_answered()
        pair.assert_at_rest()
        if ended:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("back", [True, False])
def test_cache_service_lost_at_every_point(back):
    """What was not copied is computed. `back`: another service takes over at once."""
    for point in range(200):
        pair = Pair(chunk_tokens_max=5)
        pair.start("a", PROMPT, max_tokens=4)
        ended = not all(pair.act() for _ in range(point))
        pair.decode.lose_cache()
        if back:
            pair.decode.start_cache()
        pair.run()
        pair.assert_answered()
        pair.assert_at_rest()
        if ended:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_short_pull_is_computed_from_there_on(fails):
    pair = Pair(chunk_tokens_max=4, steps_in_flight=1)
    routed = pair.start("a", PROMPT, max_tokens=4)
    pair.run(until=lambda: len(pair.decode.kinds) == 1)
    for pull in range(4):
        pair.run(until=lambda: "pull" in pair.decode.kinds)
        pair.decode.carry_out(moved=0 if pull == fails else None, error="slow" if pull == fails else None)
    pair.run()
    pair.assert_answered()
    assert routed.kept is True
    assert routed.adopted_tokens == 4 * fails
    pair.assert_at_rest()


OTHER = tuple(range(60, 79))  # 19 tokens: with two outputs it fills five blocks


def test_lapsed_at_every_point():
    """Before, while or after its blocks are pulled, prefill gives them up and somebody else writes to them: what was copied is
    never attended to, unless all of it was copied and released before."""
    released = 0
    for point in range(200):
        pair = Pair(chunk_tokens_max=5, prefill={"blocks": 6})
        routed = pair.start("a", PROMPT, max_tokens=6)
        ended = not all(pair.act() for _ in range(point))
        pair.prefill.instance._handoff.drop_kept()
        pair.whole("x", pair.prefill, OTHER, max_tokens=2)
        pair.prefill.run()
        pair.run()
        pair.assert_answered()
        pair.assert_at_rest()
        released += routed.kept is True
        if ended:
            assert 0 < released < point
            return
    raise AssertionError("it never ended")


def test_keep_time_is_over():
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=6)
    pair.run(until=lambda: "pull" in pair.decode.kinds and bool(routed.usage))
    pair.prefill.now += KEEP + 1.0
    pair.prefill.advance(0.0)
    assert not pair.prefill.instance.board.kept
    pair.run()
    pair.assert_answered()
    assert routed.kept is False
    assert routed.adopted_tokens == 0
    pair.assert_at_rest()


def test_a_reservation_that_nobody_renews_ends_silently():
    pair = Pair(prefill={"start": False})
    routed = pair.start("a", PROMPT, max_tokens=6)
    pair.hear_all()
    pair.decode.advance(LEASE - 1.0)
    pair.expect("a")
    pair.decode.advance(LEASE - 1.0)
    assert pair.decode.instance.board.loading == 1
    pair.decode.advance(2.0)
    assert not pair.decode.instance.board.groups
    pair.hear_all()
    assert not routed.ended
    pair.decode.assert_at_rest()
    pair.expect("a")
    pair.hear_all()
    assert [refused.reason for refused in routed.refused] == ["duplicate_id"], "that attempt is closed"
    pair.decode.assert_at_rest()


def test_released_in_time_or_computed():
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=6)
    pair.run(until=lambda: "Release" in pair.decode.heard)
    pair.decode.advance(pair.decode.config.tiers.release_seconds_max)
    assert pair.decode.heard == ["Release", "Adopted"]
    pair.run()
    pair.assert_answered()
    assert routed.adopted_tokens == 0
    pair.assert_at_rest()


def test_pulled_in_time_or_computed():
    """A pull that does not end: its blocks stay out of use until it does, and the request is computed in others."""
    pair = Pair()
    routed = pair.start("a", PROMPT, max_tokens=6)
    pair.run(until=lambda: "pull" in pair.decode.kinds and bool(routed.usage))
    pair.hear_all()
    pair.decode.advance(pair.decode.config.tiers.pull_seconds_max)
    pull = pair.decode.told.pop()
    pair.run()
    pair.assert_answered()
    assert pair.decode.pool.total - pair.decode.pool.free - pair.decode.pool.idle == 4
    pair.decode.told.append(pull)
    pair.run()
    pair.assert_at_rest()


def test_many_requests_in_small_pools_in_any_order():
    for seed in range(25):
        pair = Pair(chunk_tokens_max=5, blocks=12, slots=3, tokens_per_step=16)
        pair.rng = Random(seed)
        waiting = [(f"r{number}", tuple(range(number, number + 3 + 2 * number))) for number in range(7)]
        for name, prompt in waiting:
            pair.start(name, prompt, max_tokens=2 + len(name), n=1 + len(prompt) % 2)
            for _ in range(pair.rng.randrange(12)):
                pair.act()
        for _ in range(100):
            pair.run()
            refused = [name for name, routed in pair.routed_requests.items() if len(routed.ended) < len(routed.tokens)]
            if not refused:
                break
            for name in refused:
                assert pair.routed_requests[name].refused, name
                pair.replay(name)
        pair.assert_answered()
        pair.assert_at_rest()


def _faults(pair: Pair, rng: Random) -> list[Callable[[], None]]:
    """Things that may go wrong at any moment. None of them may be seen in an answer."""
    node = rng.choice((pair.prefill, pair.decode))

    def lose_worker() -> None:
        node.lose_worker("killed")
        node.restart_worker(pool_kept=rng.random() < 0.5)

    def lose_cache() -> None:
        node.lose_cache()
        node.start_cache()

    def replay() -> None:
        pair.replay(rng.choice(list(pair.routed_requests)), whole=rng.choice((None, pair.prefill, pair.decode)))

    return [
        lose_worker,
        lose_cache,
        replay,
        node.preempt,
        lambda: node.dispatch(EvictSome(rng.randrange(8))),
        lambda: pair.prefill.instance._handoff.drop_kept(),
        lambda: pair.advance(rng.choice((0.5, 3.0, 20.0))),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_anything_may_go_wrong_at_any_time(seed):
    rng = Random(seed)
    settings = {"blocks": rng.choice((9, 14, 24)), "slots": 3, "tokens_per_step": 16, "step_seconds_max": 1e6}
    pair = Pair(chunk_tokens_max=rng.choice((2, 5, 16)), steps_in_flight=rng.choice((1, 2, 3)), **settings)
    pair.rng = rng
    for number in range(6):
        length = rng.randrange(1, 24)
        pair.start(f"r{number}", range(number, number + length), max_tokens=rng.randrange(1, 9), n=rng.choice((1, 1, 2)))
        for _ in range(rng.randrange(30)):
            pair.act()
            if rng.random() < 0.05:
                rng.choice(_faults(pair, rng))()
    for _ in range(40):
        pair.run()
        open_ = [name for name, routed in pair.routed_requests.items() if len(routed.ended) < len(routed.tokens)]
        if not open_:
            break
        for name in open_:
            pair.replay(name)
            pair.run()
    pair.assert_answered()
    pair.advance(KEEP)
    pair.assert_at_rest()
