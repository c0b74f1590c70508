"""Mixtures of experts in C: picks against torch's, one kind for all experts of a layer, and their balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decoder_cases import QUANTISED_CASES, Conversation, load
from kernels import pack, small_config
from product_oracle import random_stored

from baton.models.config import Experts
from baton.models.layers.experts import pick_experts
from baton.models.tensor_types import Q4_1, Q4_K, Q6_K, Q8_0
from baton.native.balance import balance, listen
from baton.native.decoder import experts_of
from baton.native.plan import KINDS

MIXTURES = {
    "softmax": Experts(count=128, per_token=8, inner_size=1, normalised=True),
    "shares": Experts(count=5, per_token=2, inner_size=1, normalised=False),
    "sigmoid": Experts(count=33, per_token=6, inner_size=1, normalised=True, scoring="sigmoid", correction=True, scale=2.5),
    "one": Experts(count=1, per_token=1, inner_size=1, normalised=True),
    "all": Experts(count=4, per_token=4, inner_size=1, normalised=False),
}


def picked(library, experts: Experts, logits: np.ndarray, correction: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    rows, k = len(logits), experts.per_token
    picks, shares = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
    settings = experts_of(small_config(experts=experts))
    at = None if correction is None else correction.ctypes.data
    library.route(settings, at, logits.ctypes.data, rows, picks.ctypes.data, shares.ctypes.data)
    return picks, shares


@pytest.mark.parametrize("case", MIXTURES)
def test_picks_and_shares_are_those_of_torch(library, case):
    experts, rng = MIXTURES[case], np.random.default_rng(0)
    logits = (rng.standard_normal((200, experts.count)) * 3).astype(np.float32)
    correction = rng.standard_normal(experts.count).astype(np.float32) * np.float32(0.2) if experts.correction else None
    picks, shares = picked(library, experts, logits, correction)
    expected = pick_experts(torch.from_numpy(logits), experts, None if correction is None else torch.from_numpy(correction))
    assert np.array_equal(picks, expected[0].numpy())
    np.testing.assert_allclose(shares, expected[1].numpy(), rtol=2e-6)


def test_of_equal_experts_the_lower_ones_are_picked(library):
    logits = np.array([[0, 0, 0, 0, 0], [1, 2, 2, 1, 2]], np.float32)
    assert picked(library, MIXTURES["shares"], logits, None)[0].tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("case", ["softmax", "sigmoid"])
def test_what_is_no_number_is_picked_and_stays_none(library, case):
    """Its row fails alone; a pick outside of the experts would read other memory."""
    experts = replace(MIXTURES[case], correction=False)
    picks, shares = picked(library, experts, np.full((1, experts.count), np.nan, np.float32), None)
    assert picks.tolist() == [list(range(experts.per_token))]
    assert np.isnan(shares).all()


def test_all_experts_of_a_layer_are_of_what_loses_least(library):
    """A row is quantised once for all of them."""
    config = small_config(hidden_size=256, experts=Experts(count=3, per_token=2, inner_size=256, normalised=True))
    name = "layers.0.mlp.experts.{}.{}.weight"
    kinds = {(e, part): Q4_K for e in range(3) for part in ("gate", "up", "down")} | {(1, "up"): Q6_K}
    given = {name.format(*at): random_stored(np.random.default_rng(0), kind, 256, 256) for at, kind in kinds.items()}
    mixture = pack(library, config, given, "auto").blocks[0].mixture
    assert [mixture.gate_up[e].kind for e in range(3)] == [KINDS[Q8_0]] * 3
    assert [mixture.down[e].kind for e in range(3)] == [KINDS[Q4_1]] * 3


def test_experts_share_a_balance_for_the_rows_that_they_share(library):
    """Rows between an expert's two products are its own: no balance is right for all experts."""
    config = QUANTISED_CASES["experts"]
    packed = pack(library, config, {}, "int8")
    heard, packings = listen(library, packed), list(packed.of_bytes)
    assert len(heard) == len(packings) == 3 * config.layers + 1  # qkv, output, gate and up of all experts; the head
    assert all((sums > 0).all() for sums in heard)
    balance(library, packed)
    mixture = packed.blocks[0].mixture
    assert len({mixture.gate_up[e].corrections for e in range(5)}) == 1
    assert not np.array_equal(packings[2].balance, np.ones(config.hidden_size, np.float32))


def test_a_row_without_numbers_fails_alone(library):
    talk = Conversation(QUANTISED_CASES["experts with everything"], [9, 5])
    forward = talk.forward(load(library, talk.config, quantization="int4", threads=2))
    alone = forward.hidden(talk.flat([(0, 0, 9)])).copy()
    flat = talk.flat([(0, 0, 9), (1, 0, 5)])
    flat.positions[9:] = -1
    both = forward.hidden(flat)
    assert np.array_equal(both[:9], alone)
    assert np.isnan(both[9:]).all()
    forward.close()
