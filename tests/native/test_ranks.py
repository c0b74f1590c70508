"""A model divided among ranks: the numbers of one rank up to the order of sums, and the same bits on every rank and in any
batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoder_cases import EXACT_CASES, PLAIN, QUANTISED_CASES, Conversation, Result, same_bits
from ranks import on_ranks
from steps import random_steps

from baton.config import WorkerConfig
from baton.errors import EngineError
from baton.models.config import ModelConfig, Traits
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.sharded import sharded
from baton.models.open import OpenedModel
from baton.models.shard import Shard
from baton.native.exchange import RankExchange
from baton.native.library import Library
from baton.worker.draws import NOT_FINITE_ID, NOTHING_LEFT_ID
from baton.worker.forward.native_forward import load_native
from baton.worker.forward.torch_forward import load_torch, of_tensors
from baton.worker.token_masks import Masks

LENGTHS = [40, 1, 21]
NEAR = 1e-5
CASES = {
    **{name: config for name, config in EXACT_CASES.items() if config.heads % 2 == 0},
    "post norms": replace(PLAIN, traits=Traits(norms="after")),
    "norms before and after": replace(PLAIN, traits=Traits(norms="both", activation="gelu_tanh")),
    "side by side": replace(PLAIN, traits=Traits(parallel=True, layer_norm=True, norm_bias=True)),
    "sinks": replace(PLAIN, traits=Traits(sinks=True, output_bias=True)),
}
REFUSED = ("one of one expert",)


def load_part(
    library: Library | None, config: ModelConfig, exchange: RankExchange | None, *, threads: int = 1, quantization="none"
):
    """Without a library, in torch."""
    shard = Shard() if exchange is None else Shard(exchange.rank, exchange.ranks)
    part, weights = sharded(config, DummyWeights(config, 5), shard)
    settings = WorkerConfig(threads=threads, quantization=quantization, kv_dtype="float32")
    opened = OpenedModel(Path(), part, weights)
    if library is None:
        return part, load_torch(opened, settings, None, of_tensors(exchange))
    return part, load_native(library, opened, settings, None, exchange)


def results(library, config, ranks, *, seed=0, lengths=LENGTHS, torch=False, **settings) -> list[list[Result]]:
    """Of every rank."""

    def run(exchange: RankExchange | None) -> list[Result]:
        part, loaded = load_part(None if torch else library, config, exchange, **settings)
        talk = Conversation(part, lengths)
        forward = talk.forward(loaded)
        try:
            return talk.run(forward, random_steps(random.Random(seed), lengths))
        finally:
            forward.close()

    return [run(None)] if ranks == 1 else on_ranks(library, ranks, run)


@pytest.mark.parametrize("case", [name for name in CASES if name not in REFUSED])
def test_two_ranks_are_one_up_to_the_order_of_sums(library, case):
    (one,), two = results(library, CASES[case], 1), results(library, CASES[case], 2)
    assert same_bits(*two)
    for ours, expected in zip(two[0], one, strict=True):
        np.testing.assert_allclose(ours.hidden, expected.hidden, atol=NEAR, rtol=NEAR)
        np.testing.assert_allclose(ours.logits, expected.logits, atol=NEAR, rtol=NEAR)
        assert np.array_equal(ours.logits.argmax(-1), expected.logits.argmax(-1))


@pytest.mark.parametrize("case", ["plain", "experts with everything"])
def test_ranks_have_the_same_bits_in_any_batch_and_with_any_threads(library, case):
    config = CASES[case]
    expected = results(library, config, 2)[0]
    for seed, threads in ((1, 1), (2, 2)):
        found = results(library, config, 2, seed=seed, threads=threads)
        assert same_bits(found[0], expected)
        assert same_bits(found[1], expected)


@pytest.mark.parametrize("case", ["everything", "experts with everything", "side by side"])
def test_two_ranks_in_torch_exchange_through_the_same_memory(case):
    from baton.native.library import load_best

    (one,), two = results(load_best(), CASES[case], 1, torch=True), results(load_best(), CASES[case], 2, torch=True)
    assert same_bits(*two)
    for ours, expected in zip(two[0], one, strict=True):
        np.testing.assert_allclose(ours.logits, expected.logits, atol=NEAR, rtol=NEAR)


def test_three_ranks_with_one_key_head_each():
    """The shape of the default model: 9 heads, 3 of keys."""
    from baton.native.library import load_best

    library, config = load_best(), replace(PLAIN, heads=9, kv_heads=3, intermediate_size=96, tied_embeddings=True)
    (one,), three = results(library, config, 1), results(library, config, 3)
    assert same_bits(three[0], three[1])
    assert same_bits(three[0], three[2])
    for ours, expected in zip(three[0], one, strict=True):
        np.testing.assert_allclose(ours.logits, expected.logits, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("case", ["tied", "experts with everything"])
def test_quantised_parts_are_as_near_to_floats_as_the_whole(library, case, quantization):
    """Cut columns are rounded by another scale, so only the size of the error can be compared."""
    config = replace(QUANTISED_CASES[case], head_dim=32, traits=Traits(qk_norm=True))
    (exact,), (one,) = results(library, config, 1), results(library, config, 1, quantization=quantization)
    two = results(library, config, 2, quantization=quantization)
    assert same_bits(*two)

    def error(found: list[Result]) -> float:
        return float(np.mean([np.abs(a.logits - b.logits).mean() for a, b in zip(found, exact, strict=True)]))

    assert error(two[0]) < 1.5 * error(one)


def test_the_likeliest_token_of_all_ranks(library):
    """Masks, rows that are no numbers, and rows where nothing is allowed."""
    config = replace(PLAIN, vocab_size=97)
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((8, config.hidden_size), np.float32)
    hidden[5] = np.nan
    bits = rng.integers(0, 1 << 32, (7, 4), np.uint32)
    bits[2], bits[3] = 0, [0, 0, 0, 1]  # nothing; only the last token
    masks = Masks(np.array([0, 1, 2, 3, 5, 6, 7]), bits)

    def run(exchange: RankExchange | None):
        part, loaded = load_part(library, config, exchange)
        forward = Conversation(part, [1]).forward(loaded)
        found = forward.likeliest(hidden), forward.likeliest(hidden, masks), forward.logits(hidden).copy()
        forward.close()
        return found

    one, two = run(None), on_ranks(library, 2, run)
    for found in two:
        assert np.array_equal(found[0], one[0])
        assert np.array_equal(found[1], one[1])
        assert np.array_equal(found[2], one[2], equal_nan=True)  # the head is cut by tokens: no sum is
    assert one[1][2] == NOTHING_LEFT_ID
    assert one[1][3] == 96
    assert one[1][5] == NOT_FINITE_ID


def test_logits_of_more_rows_than_a_slot_holds(library):
    config = replace(PLAIN, vocab_size=1000)
    hidden = np.random.default_rng(3).standard_normal((70, config.hidden_size), np.float32)

    def run(exchange: RankExchange | None):
        part, loaded = load_part(library, config, exchange)
        forward = Conversation(part, [1]).forward(loaded)
        found = forward.logits(hidden).copy()
        forward.close()
        return found

    for found in on_ranks(library, 2, run, numbers=4096):
        assert np.array_equal(found, run(None))


def test_a_step_larger_than_a_slot_is_refused(library):
    def run(exchange: RankExchange):
        part, loaded = load_part(library, PLAIN, exchange)
        talk = Conversation(part, [40])
        with pytest.raises(EngineError, match="not enough memory for a step of 40 tokens"):
            talk.forward(loaded).hidden(talk.flat(talk.all_at_once()))

    on_ranks(library, 2, run, numbers=1024)
