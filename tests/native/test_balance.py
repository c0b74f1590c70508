"""The balance of inputs (native/balance.py): what it is, what it is good for, and that it changes no product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoder_cases import QUANTISED_CASES, Conversation, load, same_bits
from kernels import Team, pack, packed_head
from product_oracle import bytes_product, random_matrix

from baton.models.dequantise import dequantise
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import Q8_0
from baton.native.balance import balance, best_balance, listen

CONFIG = replace(QUANTISED_CASES["everything"], tied_embeddings=True)


def uneven(rows: int, width: int, seed: int) -> np.ndarray:
    """Some inputs a hundred times as large as the others, the same ones in every row."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32)
    x[:, rng.permutation(width)[: width // 32]] *= 100
    return x


def test_it_makes_the_product_of_both_sizes_smallest():
    rng = np.random.default_rng(0)
    w, x = np.exp(rng.standard_normal((2, 96)) * 2).astype(np.float32)

    def cost(d: np.ndarray) -> float:
        return float((w / d**2).sum() * (x * d**2).sum())

    best = best_balance(w, x).astype(np.float64)
    assert cost(best) < 0.5 * cost(np.ones(96))
    assert all(cost(best) < cost(best * np.exp(rng.standard_normal(96) * 0.1)) for _ in range(50))


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_where_nothing_was_heard_it_is_one(broken):
    some = np.ones(32, np.float32)
    for w, x in ((some, np.full(32, broken, np.float32)), (np.full(32, broken, np.float32), some)):
        assert best_balance(w, x).tolist() == [1.0] * 32


def test_an_input_that_is_never_used_is_bounded():
    w, x = np.ones((2, 64), np.float32)
    w[3] = x[4] = 0.0
    found = best_balance(w, x)
    assert 0.05 < found.min() < 1 < found.max() < 30


@pytest.mark.parametrize("shape", [(33, 96), (64, 576), (40, 160)], ids=str)
def test_products_are_what_their_definition_says(library, shape):
    raw, x = random_matrix(np.random.default_rng(0), Q8_0, *shape), uneven(40, shape[1], seed=1)
    packed = packed_head(library, raw)
    packing = packed.of_bytes[-1]
    packing.balance[:] = np.exp2(np.random.default_rng(2).integers(-3, 4, shape[1])).astype(np.float32)
    packing.run(library, 1)
    expected = bytes_product(x, raw, packing.balance)
    with Team(library) as team:
        ours = team.product(packed.head, x, shape[0])
        assert (np.abs(ours - expected.values) <= 2 * expected.error_max).all()
        for rows in (1, 2, 5, 17):
            assert np.array_equal(team.product(packed.head, x[:rows], shape[0]), ours[:rows])


def test_it_makes_up_for_inputs_of_different_sizes(library):
    raw = RawTensor.of_floats(np.random.default_rng(3).standard_normal((64, 576), np.float32))
    x = uneven(30, 576, seed=4)
    exact = x.astype(np.float64) @ dequantise(raw).T.astype(np.float64)
    packed = pack(library, replace(CONFIG, vocab_size=64, hidden_size=576), {"embed.weight": raw}, "int8")
    packing = packed.of_bytes[-1]
    errors = []
    with Team(library) as team:
        for each in (np.ones(576, np.float32), best_balance(packing.squares, (x * x).sum(0))):
            packing.balance[:] = each
            packing.run(library, 1)
            errors.append(np.square(team.product(packed.head, x, 64) - exact).mean())
    assert errors[1] < 0.7 * errors[0]


def test_every_matrix_of_bytes_is_listened_to(library):
    packed = pack(library, CONFIG, {}, "int8")
    weights = [packing.squares for packing in packed.of_bytes]
    heard = listen(library, packed)
    assert len(heard) == len(weights) == 4 * CONFIG.layers + 1
    assert all((sums > 0).all() for sums in (*heard, *weights))
    assert all(matrix.input_squares is None for matrix in packed.matrices())
    balance(library, packed)
    assert not packed.of_bytes


def test_two_instances_have_the_same_balance(library):
    results = []
    for threads in (1, 3):
        talk = Conversation(CONFIG, [20, 5])
        forward = talk.forward(load(library, CONFIG, quantization="int8", kv_dtype="float16", threads=threads))
        results.append(talk.run(forward, [talk.all_at_once()]))
        forward.close()
    assert same_bits(*results)


def test_weights_of_four_bits_need_none_but_for_a_head_on_tiles(library):
    """Elsewhere the head keeps its groups, and is not rotated."""
    packed = pack(library, CONFIG, {}, "int4")
    assert len(packed.of_bytes) == library.has_tiles()
    balance(library, packed)
