"""What a worker set decides: whose end counts, what its ranks agree on, and how far its slowest rank has come."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec.structs import replace

from baton.core.worker_set import (
    STEPS_UNCOMPARED_MAX,
    RankAnswers,
    RankEnds,
    SlowestProgress,
    StepDigests,
    agreed_hello,
    least_found,
    least_move,
)
from baton.errors import PeerError
from baton.protocol.control import WorkerHello
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.step import RowFailure, StepDigest, StepResult, digest_of

RESULT = StepResult(7, 1, (1, 2), (4, 5), (1, 1), (30, 31))
HELLO = WorkerHello(
    1, 64, 16, 100, 512, b"weights", 77, layout=b"heads", block_bytes=100, identity_parts={"weights": "a", "dtype": "b"}
)


def test_the_first_end_kills_all_others_once():
    ends = RankEnds(4)
    assert ends.first is None
    assert ends.ended(2) == (0, 1, 3)
    assert ends.ended(0) == () == ends.ended(2)
    assert ends.first == 2


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_answers_are_complete_with_the_last_rank_and_in_the_order_of_ranks(order):
    answers: RankAnswers[str] = RankAnswers(3)
    *early, last = order
    assert [answers.add("key", rank, f"of {rank}") for rank in early] == [None, None]
    assert len(answers) == 1
    assert answers.add("key", last, f"of {last}") == ["of 0", "of 1", "of 2"]
    assert len(answers) == 0
    assert answers.add("key", 0, "again") is None, "the next answers of the same key"
    with pytest.raises(PeerError, match="rank 0 has answered twice"):
        answers.add("key", 0, "again")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_equal_results_agree_in_any_order(late):
    digests = StepDigests(3)
    for rank in [*(each for each in range(3) if each != late), late]:
        digests.add_digest(rank, digest_of(RESULT)) if rank else digests.add_result(0, RESULT)
    digests.add_result(0, replace(RESULT, step=8))


OTHERS = {
    "a token": {"values": (30, 32)},
    "a slot": {"slots": (1, 3)},
    "an incarnation": {"incarnations": (4, 6)},
    "lengths": {"lengths": (2, 0)},
    "drafts": {"drafted": (1, 0)},
    "a failure": {"failures": (RowFailure(1, 4, "NaN"),)},
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("what", OTHERS)
def test_a_difference_in_anything_that_the_state_depends_on_ends_the_set(what, first):
    digests, other = StepDigests(2), digest_of(replace(RESULT, **OTHERS[what]))
    adding = [lambda: digests.add_result(0, RESULT), lambda: digests.add_digest(1, other)]
    adding[first]()
    with pytest.raises(PeerError, match="ranks 0 and 1 computed different results of step 7"):
        adding[1 - first]()


def test_reasons_of_failures_may_differ():
    failed = [replace(RESULT, failures=(RowFailure(1, 4, why),)) for why in ("0x1", "0x2")]
    assert digest_of(failed[0]) == digest_of(failed[1])


def test_a_rank_that_never_answers_is_named_and_memory_is_bounded():
    digests = StepDigests(3)
    for step in range(STEPS_UNCOMPARED_MAX):
        digests.add_result(0, replace(RESULT, step=step))
        digests.add_digest(1, digest_of(replace(RESULT, step=step)))
    with pytest.raises(PeerError, match="rank 2 has not answered step 0"):
        digests.add_result(0, replace(RESULT, step=STEPS_UNCOMPARED_MAX))


def test_only_rank_0_sends_results_and_only_the_others_digests():
    with pytest.raises(PeerError, match="rank 1 has sent a result"):
        StepDigests(2).add_result(1, RESULT)
    with pytest.raises(PeerError, match="rank 0 has sent a digest"):
        StepDigests(2).add_digest(0, StepDigest(1, 1, b"12345678"))
    digests = StepDigests(3)
    digests.add_digest(1, digest_of(RESULT))
    with pytest.raises(PeerError, match="rank 1 has answered step 7 twice"):
        digests.add_digest(1, digest_of(RESULT))


def test_hellos_agree_but_for_what_each_rank_has_of_its_own():
    other = replace(HELLO, pool=78, digest_seconds=3.0, plan={"memory_gib": 1.5})
    assert agreed_hello([HELLO, other]) == replace(HELLO, block_bytes=200), "a block has a part on each rank"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"identity": b"other", "identity_parts": {"weights": "c", "dtype": "b"}}, r"rank 1 has other weights .*\(weights\)"),
        ({"blocks": 60}, "rank 1 has another number of KV blocks than rank 0: 60 instead of 64"),
        ({"layout": b"x"}, "rank 1 has another KV layout"),
        ({"context_tokens": 9}, "rank 1 has another context_tokens than rank 0: 9 instead of 512"),
    ],
)
def test_a_rank_that_differs_is_named_with_the_difference(change, words):
    with pytest.raises(PeerError, match=words):
        agreed_hello([HELLO, replace(HELLO, **change), HELLO])


def test_a_move_is_the_least_of_its_ranks_and_any_error_is_its_error():
    assert least_move([MoveResult(3, 5, 0.1), MoveResult(3, 2, 0.4), MoveResult(3, 4)]) == MoveResult(3, 2, 0.4)
    assert least_move([MoveResult(3, 5), MoveResult(3, 0, error="disk full")]) == MoveResult(3, 0, error="rank 1: disk full")
    assert least_found([StorageAnswer(3, 5), StorageAnswer(3, 4)]) == StorageAnswer(3, 4)
    assert least_found([StorageAnswer(3, 5, "late"), StorageAnswer(3, 4)]).error == "rank 0: late"


def test_the_slowest_rank_is_the_progress_of_all():
    slowest = SlowestProgress()
    before = slowest.observe((1, 1))
    assert slowest.observe((9, 1)) == before, "one rank alone is no progress"
    assert slowest.observe((9, 2)) == before + 1
    assert slowest.observe((9, 3)) == before + 1
    assert slowest.observe((10, 3)) == before + 2
    assert SlowestProgress().observe((41,)) == 41, "one rank is its own word"
