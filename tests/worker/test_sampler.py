"""The sampler against a naive one, row by row; draws that depend on nothing but their own row."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_sampler import naive_kept, naive_sample, naive_uniform

from baton.protocol.request import SamplingParams
from baton.worker.draws import draw_from_best, uniforms
from baton.worker.failure import NOT_FINITE, NOTHING_LEFT
from baton.worker.flat_batch import FEEDBACK
from baton.worker.sampler import Chosen, SampleRow
from baton.worker.sampler import sample as sample_drawn
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.sampling_state import ANY, BadWords, SequenceSampling, sampled_on_host

VOCAB = 24
EDGE = 1e-5


def make_row(params: SamplingParams, prompt=(), outputs=(), index=0, vocab=VOCAB) -> SampleRow:
    state = SequenceSampling(params, index, vocab, list(prompt), [])
    for token in outputs:
        state.sampled(token)
    return SampleRow(state, np.array(outputs, np.int32))


def sample(logits: np.ndarray, rows: list[SampleRow]) -> Chosen:
    """As in a step where row i sits in slot i."""
    columns = SamplingColumns(len(rows))
    for slot, row in enumerate(rows):
        columns.assign_slot(slot, row.state)
    positions = np.array([row.outputs.size for row in rows])
    return sample_drawn(logits, rows, columns.draws_at(np.arange(len(rows)), positions))


def grid_logits(rng: random.Random, vocab: int = VOCAB) -> list[float]:
    """Multiples of 1/8: ties are frequent and exact, near-ties do not exist."""
    return [rng.randint(-64, 64) / 8 for _ in range(vocab)]


token_ids = st.integers(0, VOCAB + 5)  # some outside the vocabulary
parameters = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.75]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    logit_bias=st.lists(st.tuples(token_ids, st.integers(-80, 80).map(lambda x: x / 8)), max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
rows_of_a_batch = st.lists(
    st.tuples(
        parameters,
        st.integers(0, 3),
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows_of_a_batch)
def test_any_mix_equals_the_naive_sampler(batch):
    logits = [grid_logits(random.Random(seed)) for *_, seed in batch]
    rows = [make_row(params, prompt, outputs, index) for params, index, prompt, outputs, _ in batch]
    result = sample(np.array(logits, np.float32), rows)
    assert not result.failed
    for i, (params, index, prompt, outputs, _) in enumerate(batch):
        token, edge = naive_sample(logits[i], params, index, prompt, outputs)
        if edge > EDGE:
            assert result.tokens[i] == token


ONE_AT_A_TIME = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0},
    "bias": {"logit_bias": ((3, 12.0), (999, 50.0))},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3, 999)},
    "bad_words": {"bad_words": ((4,), (2, 5), (1, 2, 6), (999,), (999, 7))},
}


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_each_parameter_alone(name):
    rng = random.Random(name)
    for trial in range(60):
        params = SamplingParams(seed=trial, **ONE_AT_A_TIME[name])
        prompt, outputs = [rng.randrange(VOCAB) for _ in range(5)], [rng.choice([1, 2, 3]) for _ in range(rng.randint(0, 6))]
        logits = grid_logits(rng)
        token, edge = naive_sample(logits, params, 0, prompt, outputs)
        result = sample(np.array([logits], np.float32), [make_row(params, prompt, outputs)])
        assert edge <= EDGE or result.tokens.tolist() == [token]


def test_draws_do_not_depend_on_the_batch():
    rng = random.Random(3)
    vocab = 5000
    kinds = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 50}, {}, {"logprobs": 3}]
    params = [SamplingParams(seed=i, **rng.choice(kinds), repetition_penalty=rng.choice([1.0, 1.2])) for i in range(40)]
    logits = np.random.default_rng(1).standard_normal((40, vocab), np.float32) * 3
    make = lambda i: make_row(params[i], prompt=[1, 2, i], outputs=[7] * (i % 5), index=i % 3, vocab=vocab)  # noqa: E731
    alone = [int(sample(logits[i : i + 1].copy(), [make(i)]).tokens[0]) for i in range(40)]
    for _ in range(5):
        chosen = rng.sample(range(40), rng.randint(2, 40))
        together = sample(logits[chosen].copy(), [make(i) for i in chosen])
        assert together.tokens.tolist() == [alone[i] for i in chosen]


def test_a_draw_depends_on_seed_index_and_position():
    logits = np.zeros((1, 4096), np.float32)
    draw = lambda seed, index, position: int(  # noqa: E731
        sample(
            logits.copy(),
            [make_row(SamplingParams(temperature=1.0, seed=seed), outputs=[0] * position, index=index, vocab=4096)],
        ).tokens[0]
    )
    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(-1, 2, 3), draw(3, 2, 1)}) == 6


def test_uniform_numbers_equal_the_naive_ones():
    triples = [(5, 0, 0), (2**64 - 1, 127, 10**6), (0, 0, 0), (1 << 63, 1, 2)]
    columns = [np.array(column, np.uint64) for column in zip(*triples, strict=True)]
    assert uniforms(*columns).tolist() == [naive_uniform(*triple) for triple in triples]


@pytest.mark.parametrize("vary", ["seed", "index", "position"])
def test_draws_follow_the_distribution(vary):
    """Chi-square with 7 degrees of freedom; 24.3 is passed by chance once in a thousand times, and the seeds are fixed."""
    count = 20000
    weights = np.array([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.01], np.float32)
    numbers = np.arange(count, dtype=np.uint64)
    fixed = np.full(count, 17, np.uint64)
    columns = [numbers if vary == name else fixed for name in ("seed", "index", "position")]
    scaled = weights / weights.max()
    drawn = Counter(draw_from_best(scaled, u, top_k=-1, top_p=1.0, min_p=0.0) for u in uniforms(*columns).tolist())
    expected = weights / weights.sum() * count
    assert sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in range(8)) < 24.3


def test_top_p_cuts_where_the_naive_one_cuts_on_a_large_vocabulary():
    """The threshold that saves the sort must not cost a candidate."""
    rng = np.random.default_rng(5)
    for top_p in (0.3, 0.9, 0.99, 0.9999):
        logits = (rng.normal(size=3000) * 2).astype(np.float32)
        weights = np.exp(logits - logits.max())
        params = SamplingParams(temperature=1.0, top_p=top_p)
        kept = naive_kept(np.log(weights.astype(np.float64)).tolist(), params)
        assert draw_from_best(weights, 1.0 - 2**-53, -1, top_p, 0.0) == kept[-1][0]
        assert draw_from_best(weights, 0.0, -1, top_p, 0.0) == kept[0][0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(poison, sampling):
    logits = np.random.default_rng(0).standard_normal((3, VOCAB), np.float32)
    rows = [make_row(SamplingParams(seed=i, **sampling)) for i in range(3)]
    healthy = sample(logits.copy(), rows).tokens
    logits[1, 5] = poison
    result = sample(logits, rows)
    assert result.failed == {1: NOT_FINITE}
    assert result.tokens[[0, 2]].tolist() == healthy[[0, 2]].tolist()
    assert 1 not in result.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_allowed_token_fails_alone(temperature):
    everything = tuple((token,) for token in range(VOCAB))
    rows = [make_row(SamplingParams(temperature=temperature, bad_words=words)) for words in ((), everything)]
    assert sample(np.zeros((2, VOCAB), np.float32), rows).failed == {1: NOTHING_LEFT}


def test_logprobs_are_of_the_raw_logits():
    logits = np.array([grid_logits(random.Random(1))], np.float32)
    expected = torch.from_numpy(logits).log_softmax(-1)[0]
    best = int(expected.argmax())
    params = SamplingParams(logprobs=3, bad_words=((best,),), temperature=0.5, seed=4)
    result = sample(logits, [make_row(params)])
    row = result.logprobs[0]
    assert row.token == result.tokens[0] != best
    assert row.logprob == pytest.approx(float(expected[row.token]), abs=1e-5)
    assert row.rank == 1 + int((expected > expected[row.token]).sum())
    assert [token for token, _ in row.top] == sorted(range(VOCAB), key=lambda t: (-float(expected[t]), t))[:3]


@pytest.mark.parametrize(
    ("outputs", "bans"),
    [
        ([], []),
        ([1, 2, 3], [[ANY, 4]]),
        ([9, 2, 3], []),
        ([1, 2, FEEDBACK], [[5, 6], [3, 4]]),
        ([9, 2, FEEDBACK], [[5, 6]]),
        ([FEEDBACK], [[5, 6]]),
    ],
)
def test_the_end_of_a_bad_word_is_forbidden_behind_the_rest_of_it_and_behind_nothing_else(outputs: list[int], bans):
    """The last token may not be known yet: then a ban says which one makes it count."""
    words = BadWords([(1, 2, 3, 4), (5, 6), (7,)], VOCAB)
    assert words.bans(np.array(outputs, np.int32)).tolist() == bans


def test_any_number_may_be_asked_for_as_top_k():
    """More than there are tokens is all of them. As it is, it would not fit into a column, and the worker would die of it."""
    logits = np.random.default_rng(3).normal(size=(1, VOCAB)).astype(np.float32)
    tokens = []
    for top_k in (0, VOCAB, 2**40):
        row = make_row(SamplingParams(temperature=1.0, seed=7, top_p=0.9, top_k=top_k))
        tokens.append(int(sample(logits.copy(), [row]).tokens[0]))
    assert len({*tokens}) == 1


@pytest.mark.parametrize(
    "asked",
    [
        *({"logit_bias": ((1, 2.0),)}, {"bad_words": ((1, 2),)}, {"min_tokens": 1}, {"logprobs": 0}, {"prompt_logprobs": 0}),
        *({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}),
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_whoever_needs_the_tokens_so_far_on_the_host_is_known(asked):
    assert sampled_on_host(SamplingParams(**asked))
    assert not sampled_on_host(SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=5))
