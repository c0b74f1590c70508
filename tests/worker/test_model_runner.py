"""One runner, plans by hand: rows and their order, contradictions, failures, log-probabilities, bits."""

from __future__ import annotations

import dataclasses
import math
import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from rig import TINY, TINY_SEED, Rig, RigModel, generate, make_pool, make_runner, tiny_model, tiny_oracle

from baton.errors import ProtocolError
from baton.kvpool.layout import KVKind
from baton.models.loaders.dummy import DummyWeights
from baton.models.raw_tensor import RawTensor
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.progress import ProgressWord
from baton.protocol.request import FinishReason, SamplingParams
from baton.protocol.step import PREEMPTED_TOKEN_ID, BatchRows, NewSequence, StepPlan
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.cpu import CpuPlatform
from baton.worker.sampling_state import BANS_MAX, Tally
from dense_oracle import all_logits


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def oracle():
    return tiny_oracle()


@pytest.fixture
def runner(model):
    return make_runner(model, make_pool(model, blocks=16, block_size=4), slots=4)


def new(slot: int, tokens, *, incarnation: int = 1, blocks=(0, 1, 2), computed: int = 0, sampling: int = 0) -> NewSequence:
    tokens = tuple(tokens)
    return NewSequence(
        slot=Slot(slot),
        incarnation=Incarnation(incarnation),
        tokens=tokens,
        prompt_tokens=len(tokens),
        computed_tokens=computed,
        blocks=tuple(map(BlockId, blocks)),
        sampling=sampling,
        index=0,
    )


def plan(step: int, *, run=(), **parts) -> StepPlan:
    slots, counts = tuple(slot for slot, _ in run), tuple(count for _, count in run)
    parts.setdefault("sampling", (SamplingParams(),))
    return StepPlan(StepNo(step), WorkerEpoch(1), run=BatchRows(slots, counts), **parts)


# Rows


def test_rows_are_what_runs_then_what_is_dropped(oracle, runner):
    first = runner.execute(plan(1, new=(new(2, range(9)), new(0, [5], blocks=(9,))), run=[(2, 4), (0, 1)]))
    token = int(all_logits(oracle, [5])[-1].argmax())
    assert (first.slots, first.incarnations, first.lengths, first.values) == ((2, 0), (1, 1), (0, 1), (token,))
    second = runner.execute(plan(2, drops=((Slot(2), Incarnation(1)),), run=[(0, 1)]))
    assert second.slots == (0, 2)
    assert second.values[0] == int(all_logits(oracle, [5, token])[-1].argmax())
    assert second.values[1] == PREEMPTED_TOKEN_ID
    third = runner.execute(plan(3, drops=((Slot(0), Incarnation(1)),)))
    assert (third.slots, third.values, third.epoch, third.step) == ((0,), (PREEMPTED_TOKEN_ID,), 1, 3)


def test_a_slot_is_dropped_and_taken_in_one_plan(oracle, runner):
    runner.execute(plan(1, new=(new(1, [1, 2, 3]),), run=[(1, 3)]))
    result = runner.execute(
        plan(2, drops=((Slot(1), Incarnation(1)),), new=(new(1, [7, 7], incarnation=2, blocks=(0,)),), run=[(1, 2)])
    )
    assert result.slots == (1, 1)
    assert result.incarnations == (2, 1)
    assert result.values == (int(all_logits(oracle, [7, 7])[-1].argmax()), PREEMPTED_TOKEN_ID)
    # The same slot runs as many tokens as in the step before, and is somebody else's.
    result = runner.execute(
        plan(3, drops=((Slot(1), Incarnation(2)),), new=(new(1, [8, 9], incarnation=3, blocks=(0,)),), run=[(1, 2)])
    )
    assert result.incarnations == (3, 2)
    assert result.values == (int(all_logits(oracle, [8, 9])[-1].argmax()), PREEMPTED_TOKEN_ID)


CONTRADICTIONS = {
    "drop of nobody": plan(2, drops=((Slot(3), Incarnation(1)),)),
    "drop of another incarnation": plan(2, drops=((Slot(0), Incarnation(2)),)),
    "a taken slot": plan(2, new=(new(0, [1], incarnation=2),)),
    "no such slot": plan(2, new=(new(9, [1]),)),
    "too few blocks": plan(2, new=(new(1, range(9), blocks=(3, 4)),)),
    "no such block": plan(2, new=(new(1, [1], blocks=(16,)),)),
    "everything computed": plan(2, new=(new(1, [1, 2], computed=2),)),
    "no such settings": plan(2, new=(new(1, [1], sampling=1),)),
    "settings counted from the end": plan(2, new=(new(1, [1], sampling=-1),)),
    "growth of nobody": plan(2, grown=((Slot(1), BlockId(3)),)),
    "growth by no block": plan(2, grown=((Slot(0), BlockId(-1)),)),
    "fold outside the table": plan(2, deduplicated=((Slot(0), 3, BlockId(5)),)),
    "run of nobody": plan(2, run=[(1, 1)]),
    "run of no slot": plan(2, run=[(4, 1)]),
    "run twice": plan(2, run=[(0, 1), (0, 1)]),
    "run past the tokens": plan(2, run=[(0, 2)]),
    "run of nothing": plan(2, run=[(0, 0)]),
    "columns of different length": StepPlan(StepNo(2), WorkerEpoch(1), run=BatchRows((Slot(0),), ())),
    "a plan was lost": plan(3, run=[(0, 1)]),
    "the same plan again": plan(1, run=[(0, 1)]),
    "drafts of other rows": StepPlan(StepNo(2), WorkerEpoch(1), run=BatchRows((Slot(0),), (1,), (1, 2))),
    "fewer drafts than none": StepPlan(StepNo(2), WorkerEpoch(1), run=BatchRows((Slot(0),), (1,), (-1,))),
    "an adapter, which nobody has": plan(2, new=(structs.replace(new(1, [1]), adapter=1),)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_plan_that_contradicts_the_state_is_refused(runner, name):
    runner.execute(plan(1, new=(new(0, [1, 2, 3]),), run=[(0, 3)]))
    with pytest.raises(ProtocolError):
        runner.execute(CONTRADICTIONS[name])


def test_a_run_past_the_blocks_is_refused(runner):
    runner.execute(plan(1, new=(new(0, [1, 2, 3, 4], blocks=(0,)),), run=[(0, 4)]))
    with pytest.raises(ProtocolError, match="blocks"):
        runner.execute(plan(2, run=[(0, 1)]))


# Forbidden tokens


def test_only_a_row_whose_likeliest_token_is_forbidden_needs_all_its_logits(model):
    """What comes is what comes the long way, which rows take that ask for log-probabilities."""
    prompts = {"word": [1, 2, 3], "words": [9], "stop": [4, 5, 60, 7], "elsewhere": [8, 8]}
    free = generate(model, prompts, max_tokens=12)
    second, third = free["words", 0][1:3]
    forbids: dict[str, dict[str, Any]] = {
        "word": {"bad_words": ((free["word", 0][3],),)},
        "words": {"bad_words": ((second, third),)},
        "stop": {"stop_token_ids": (free["stop", 0][2],), "min_tokens": 6},
        "elsewhere": {"bad_words": ((next(token for token in range(TINY.vocab_size) if token not in free["elsewhere", 0]),),)},
    }

    def run(**more: Any) -> tuple[dict[tuple[str, int], list[int]], int]:
        rig, rows = Rig(model), 0
        logits = rig.runner.executor.forward.logits

        def counted(hidden: np.ndarray) -> np.ndarray:
            nonlocal rows
            rows += len(hidden)
            return logits(hidden)

        rig.runner.executor.forward.logits = counted
        for name, prompt in prompts.items():
            rig.submit(name, prompt, max_tokens=12, **forbids[name], **more)
        return rig.run(), rows

    (short, few), (long, all_of_them) = run(), run(logprobs=0)
    assert short == long
    assert short["elsewhere", 0] == free["elsewhere", 0]
    assert free["word", 0][3] not in short["word", 0]
    assert (second, third) not in pairwise(short["words", 0])
    assert free["stop", 0][2] not in short["stop", 0][:6]
    assert 3 <= few < all_of_them / 2


def test_a_greedy_row_that_may_say_nothing_fails_alone(model):
    rig = Rig(model)
    rig.submit("mute", [1, 2], max_tokens=4, bad_words=tuple((token,) for token in range(TINY.vocab_size)))
    rig.submit("well", [1, 2], max_tokens=4)
    tokens = rig.run()
    assert rig.ended["mute", 0].reason is FinishReason.ERROR
    assert "no token is allowed" in rig.ended["mute", 0].detail
    assert tokens["well", 0] == generate(model, {"well": [1, 2]}, max_tokens=4)["well", 0]


# Failures


class PoisonedWeights(DummyWeights):
    """The embedding of one token is not-a-number."""

    def __init__(self, token: int) -> None:
        super().__init__(TINY, TINY_SEED)
        self._token = token

    def raw(self, name: str) -> RawTensor:
        tensor = super().raw(name)
        if name == "embed.weight":
            tensor.data.view(np.float32)[self._token] = np.nan
        return tensor


def poisoned(token: int, **settings) -> RigModel:
    return tiny_model(weights=PoisonedWeights(token), **settings)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of the poison, when it is quantised
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"compute": "torch"}], ids=["exact", "quantised", "torch"])
def test_not_a_number_ends_one_sequence_only(chunk, settings):
    requests = {"well": [1, 2, 3, 4, 5, 6], "sick": [1, 2, 3, 50, 4, 5, 6], "other": [9, 8, 7]}
    healthy_model = tiny_model(**settings)
    rig = Rig(poisoned(50, **settings), chunk=chunk)
    for name, prompt in requests.items():
        rig.submit(name, prompt, max_tokens=8, bad_words=((50,),))
    answers = rig.run()
    assert rig.ended["sick", 0].reason is FinishReason.ERROR
    assert "NaN" in rig.ended["sick", 0].detail
    assert ("sick", 0) not in answers
    for name in ("well", "other"):
        healthy = Rig(healthy_model)
        healthy.submit(name, requests[name], max_tokens=8, bad_words=((50,),))
        assert answers[name, 0] == healthy.run()[name, 0]
    # Nothing of it was published: the same prompt fails again, and a clean one that shares its start does not.
    rig.submit("again", requests["sick"], max_tokens=4)
    rig.submit("clean", [1, 2, 3, 4], max_tokens=4, bad_words=((50,),))
    rig.run()
    assert rig.ended["again", 0].reason is FinishReason.ERROR
    assert rig.ended["clean", 0].reason is FinishReason.LENGTH


def test_a_failed_sequence_answers_until_it_is_dropped():
    sick = poisoned(50)
    runner = make_runner(sick, make_pool(sick, blocks=8, block_size=4), slots=2)
    first = runner.execute(plan(1, new=(new(0, [50]), new(1, [3], blocks=(4,))), run=[(0, 1), (1, 1)]))
    later = runner.execute(plan(2, run=[(0, 1), (1, 1)]))
    for result in (first, later):
        assert result.lengths == (0, 1)
        assert result.values[0] >= 0
        assert [(f.slot, f.incarnation) for f in result.failures] == [(0, 1)]
    dropped = runner.execute(plan(3, drops=((Slot(0), Incarnation(1)),), run=[(1, 1)]))
    assert dropped.failures == ()
    fresh = runner.execute(plan(4, new=(new(0, [3], incarnation=2, blocks=(5,)),), run=[(0, 1)]))
    assert fresh.failures == ()
    assert fresh.values == first.values


def test_an_id_outside_the_vocabulary_fails_alone(runner):
    result = runner.execute(plan(1, new=(new(0, [1, 97]), new(1, [3], blocks=(4,))), run=[(0, 2), (1, 1)]))
    assert result.lengths == (0, 1)
    assert result.values[0] >= 0
    assert "outside the vocabulary of 97" in result.failures[0].reason


@pytest.mark.parametrize("wrong", [97, 2**31 - 1])
def test_a_label_outside_the_vocabulary_fails_alone(runner, wrong):
    """It ended the worker, and with it every step that was under way."""
    asked = SamplingParams(max_tokens=1, pooling="last", label_ids=(3, wrong))
    sequences = (new(0, [1, 2]), new(1, [3], blocks=(4,), sampling=1))
    result = runner.execute(plan(1, new=sequences, run=[(0, 2), (1, 1)], sampling=(asked, SamplingParams())))
    assert result.lengths == (0, 1)
    assert [failure.slot for failure in result.failures] == [0]
    assert "a token id of the labels is outside the vocabulary of 97" in result.failures[0].reason


@pytest.mark.parametrize("wrong", [97, 70_000, 2**31 - 1])
def test_an_id_outside_the_vocabulary_gets_into_no_table(runner, wrong):
    """Found by a review: counts of a GPU are [slots, vocabulary], and a larger id is a place in a neighbour's row."""
    asked = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((wrong, 5.0),), bad_words=((wrong,),))
    first = plan(1, new=(new(0, [1, wrong]), new(1, [3], blocks=(4,))), run=[(0, 2), (1, 1)], sampling=(asked,))
    assert "outside the vocabulary of 97" in runner.execute(first).failures[0].reason
    for state in runner.sampling.states[:2]:
        tables = [state.bias_ids, state.tally.ids if state.tally is not None else [], state.stop_ids]
        assert all(0 <= token < 97 for table in tables for token in table)
    assert runner.batch.tokens[0].max() < 97


def test_a_tally_has_no_ids_outside_the_vocabulary():
    tally = Tally([5, 97, 2**31 - 1], [6, 98, 6], 97, with_prompt=True)
    assert (tally.ids.tolist(), tally.outputs.tolist()) == ([5, 6], [0, 2])


def test_more_bans_than_a_sequence_may_have_fail_alone(runner):
    words = tuple((1, token % 97) for token in range(BANS_MAX + 1))
    greedy, asked = SamplingParams(), SamplingParams(bad_words=words, min_tokens=3)
    both = (new(0, [1, 2]), new(1, [3], blocks=(4,), sampling=1))
    result = runner.execute(plan(1, new=both, run=[(0, 2), (1, 1)], sampling=(asked, greedy)))
    assert result.lengths == (0, 1)
    assert f"exclude {BANS_MAX + 1} tokens at a time" in result.failures[0].reason


# Log-probabilities


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_logprobs_and_prompt_logprobs(model, oracle, chunk):
    prompt = [5, 3, 60, 60, 1, 2, 9, 11, 30]
    rig = Rig(model, chunk=chunk)
    rig.submit("a", prompt, max_tokens=5, logprobs=3, prompt_logprobs=2)
    rig.submit("b", prompt, max_tokens=5)
    answers = rig.run()
    assert answers["a", 0] == answers["b", 0]
    assert ("b", 0) not in rig.logprobs
    tokens = prompt + answers["a", 0]
    expected = all_logits(oracle, tokens[:-1]).log_softmax(-1)
    sampled = [row.sampled for row in rig.logprobs["a", 0] if row.sampled is not None]
    said = {row.prompt_from + i: word for row in rig.logprobs["a", 0] for i, word in enumerate(row.prompt)}
    assert sorted(said) == list(range(1, len(prompt)))
    said |= {len(prompt) + i: word for i, word in enumerate(sampled)}
    for position, word in said.items():
        row = expected[position - 1]
        assert word.token == tokens[position]
        assert word.logprob == pytest.approx(float(row[word.token]), abs=1e-4)
        assert word.rank == 1 + int((row > row[word.token]).sum())
        best = row.topk(3 if position >= len(prompt) else 2)
        assert [token for token, _ in word.top] == best.indices.tolist()
        assert [value for _, value in word.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(math.isfinite(word.logprob) for word in said.values())


# Bits


def logits_of(runner_model, parts, companions: bool, chunk: int | None = None) -> list[np.ndarray]:
    """Logits of sequence 0 at each of its samples, alone or with neighbours."""
    seen: list[np.ndarray] = []
    rig = Rig(runner_model, chunk=chunk)
    inner = rig.runner.executor.forward.logits

    def spy(hidden):
        logits = inner(hidden)
        seen.append(logits[:1].copy())
        return logits

    rig.runner.executor.forward.logits = spy
    rig.submit("a", parts[0], max_tokens=6)
    if companions:
        for i, prompt in enumerate(parts[1:]):
            rig.submit(f"b{i}", prompt, max_tokens=6)
    rig.run()
    return seen[:6]


COMPANY = [[1, 2, 3, 4, 5], [7] * 9, [8, 9]]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_logits_in_company_are_those_alone(quantization):
    model = tiny_model(compute="native", quantization=quantization)
    alone, together = (logits_of(model, COMPANY, companions) for companions in (False, True))
    assert np.array_equal(alone, together)


def test_in_torch_they_differ_by_rounding():
    """Its matrix products may sum in another order when they have more rows: a few units in the last place."""
    model = tiny_model(compute="torch")
    alone, together = (logits_of(model, COMPANY, companions) for companions in (False, True))
    np.testing.assert_allclose(alone, together, atol=2e-5, rtol=0)
    assert np.array_equal(together, logits_of(model, COMPANY, True))  # the same run gives the same bits


# The platform


def test_the_pool_can_be_another_process_s(model):
    platform = CpuPlatform()
    layout = kv_layout(TINY, 4, KVKind("float32"))
    pool = platform.create_pool(layout, 16)
    attached = platform.attach_pool(os.dup(pool.fd), pool.announcement())
    first = make_runner(model, attached, slots=2)
    del attached
    tokens = [1, 2, 3, 4, 5, 6, 7]
    expected = first.execute(plan(1, new=(new(0, tokens),), run=[(0, 7)])).values
    first.close()
    # A restarted worker finds the computed blocks where they were.
    second = make_runner(model, pool, slots=2)
    assert second.execute(plan(9, new=(new(0, tokens, computed=6),), run=[(0, 1)])).values == expected
    other = platform.create_pool(dataclasses.replace(layout, layers=1), 16)
    with pytest.raises(ProtocolError, match="is not what a pool of this model looks like"):
        ModelRunner(second.executor, other, slots=2)


def test_bad_words_of_one_request_are_made_once(runner):
    news = tuple(new(slot, [1, 2], blocks=(slot,), sampling=slot // 2) for slot in range(4))
    settings = (SamplingParams(bad_words=((7,), (8, 9))), SamplingParams())
    result = runner.execute(plan(1, new=news, sampling=settings, run=[(slot, 2) for slot in range(4)]))
    assert 7 not in result.values[:2]
    first, second, *others = [sampling.bad_words for sampling in runner.sampling.states]
    assert first is second is not None
    assert others == [None, None]


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_a_step_advances_the_progress_word_in_every_layer(compute):
    model = tiny_model(compute=compute)
    runner = make_runner(model, make_pool(model, blocks=8, block_size=4), slots=2)
    word = ProgressWord.create()
    runner.report_progress(word)
    runner.execute(plan(1, new=(new(0, [3, 4, 5]),), run=[(0, 3)]))
    first = word.value
    assert first > model.config.layers
    runner.execute(plan(2, run=[(0, 1)]))
    assert word.value > first + model.config.layers
    before = word.value
    runner.execute(plan(3, drops=((Slot(0), Incarnation(1)),)))
    assert word.value > before, "also where nothing is computed"
    runner.close()
    word.close()
