"""The whole decoder in C against the one in torch, for models of every trait; and the same bits in any chunks and company.

Unquantised, the two differ by the order of sums only. With weights of 4 bits, a tiny difference may put an activation that
stands between two numbers on the other side: then it is off by one part in 127 of the largest of its group, and so is, a
little, all that follows from it. It takes a difference of 1e-7 to meet an edge, so of tokens that do not see each other nearly
all must be as near as unquantised ones; and where they do, none may be further off than some such flips. With weights of 8 bits
they round differently (csrc/matmul_int8.h, against product_oracle.py); they must be as near to the unquantised one as torch is.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from decoder_cases import EXACT_CASES, QUANTISED_CASES, Conversation, Result, load, same_bits
from steps import Part, random_steps

from baton.protocol.progress import ProgressWord
from baton.worker.draws import NOTHING_LEFT_ID
from baton.worker.token_masks import Masks

LENGTHS = [70, 1, 33, 130]
STRANGERS = [1] * 100
EXACT = 2e-5
FLIPS = 0.15
"""Hidden numbers are up to 7 here, and a flip moves one by up to 0.06."""


def some_steps(lengths: list[int], seed: int = 0) -> list[list[Part]]:
    return random_steps(random.Random(seed), lengths)


@cache
def in_torch(case: str, quantization: str, lengths: tuple[int, ...] = tuple(LENGTHS)) -> list[Result]:
    """With keys and values kept as the kernels keep them."""
    config = (EXACT_CASES | QUANTISED_CASES)[case]
    talk = Conversation(config, list(lengths))
    kv_dtype = "float32" if quantization == "none" else "float16"
    return talk.run(talk.forward(load(None, config, quantization=quantization, kv_dtype=kv_dtype)), some_steps(talk.lengths))


def in_c(library, case: str, quantization: str, lengths: list[int], threads: int = 1, seed: int = 0) -> list[Result]:
    talk = Conversation((EXACT_CASES | QUANTISED_CASES)[case], lengths)
    kv_dtype = "float32" if quantization == "none" else "float16"
    forward = talk.forward(load(library, talk.config, quantization=quantization, kv_dtype=kv_dtype, threads=threads))
    try:
        return talk.run(forward, some_steps(lengths, seed))
    finally:
        forward.close()


@pytest.mark.parametrize("case", EXACT_CASES)
def test_unquantised_it_is_the_decoder_in_torch(library, case):
    for ours, expected in zip(in_c(library, case, "none", LENGTHS), in_torch(case, "none"), strict=True):
        np.testing.assert_allclose(ours.hidden, expected.hidden, atol=EXACT, rtol=EXACT)
        np.testing.assert_allclose(ours.logits, expected.logits, atol=EXACT, rtol=EXACT)


def distances(ours: list[Result], expected: list[Result]) -> np.ndarray:
    """Of every token's hidden numbers."""
    return np.concatenate([np.abs(a.hidden - b.hidden).max(-1) for a, b in zip(ours, expected, strict=True)])


@pytest.mark.parametrize("case", QUANTISED_CASES)
def test_with_weights_of_four_bits_it_rounds_like_the_one_in_torch(library, case):
    strangers = distances(in_c(library, case, "int4", STRANGERS), in_torch(case, "int4", tuple(STRANGERS)))
    if not library.has_tiles():  # those round otherwise, and less: test_products.py says how
        assert np.mean(strangers < EXACT) > 0.9
    long = distances(in_c(library, case, "int4", LENGTHS), in_torch(case, "int4"))
    far = np.concatenate((strangers, long))
    if "experts" in case:  # a flip may send a token whose router hardly prefers one expert to another
        assert np.mean(far < FLIPS) > 0.97
    else:
        assert far.max() < FLIPS


@pytest.mark.parametrize("quantization", ["int8", "auto"])
@pytest.mark.parametrize("case", QUANTISED_CASES)
def test_with_weights_of_eight_bits_it_is_as_good_as_the_one_in_torch(library, case, quantization):
    exact = in_torch(case, "none")
    ours, theirs = distances(in_c(library, case, quantization, LENGTHS), exact), distances(in_torch(case, quantization), exact)
    assert ours.mean() < 1.5 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("case", ["everything", "experts with everything"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_sequence_gets_the_same_bits_in_any_chunks_and_company(library, quantization, case):
    talk = Conversation(QUANTISED_CASES[case], LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization=quantization))
    alone = talk.run(forward, [[part] for part in talk.all_at_once()])
    forward.close()
    for threads in (1, 2, 3):
        crowded = talk.forward(load(library, talk.config, quantization=quantization, threads=threads))
        assert same_bits(talk.run(crowded, some_steps(LENGTHS, seed=threads)), alone)
        crowded.close()


def assert_same_bits_near_the_oracle(library, quantization, kv_dtype):
    talk = Conversation(replace(QUANTISED_CASES["everything"], head_dim=64), LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization=quantization, kv_dtype=kv_dtype))
    alone = talk.run(forward, [[part] for part in talk.all_at_once()])
    forward.close()
    for threads in (1, 2, 3):
        crowded = talk.forward(load(library, talk.config, quantization=quantization, kv_dtype=kv_dtype, threads=threads))
        assert same_bits(talk.run(crowded, some_steps(LENGTHS, seed=threads)), alone)
        crowded.close()
    oracle = load(None, talk.config, quantization=quantization)
    assert distances(alone, talk.run(talk.forward(oracle), some_steps(LENGTHS))).max() < 2 * FLIPS  # keys have 8 bits


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_so_it_does_with_keys_and_values_of_8_bits(library, quantization):
    assert_same_bits_near_the_oracle(library, quantization, "int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_so_it_does_on_tiles(tiled, quantization):
    assert_same_bits_near_the_oracle(tiled, quantization, "int8")


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_what_the_pool_holds_can_be_chosen(library, kv_dtype):
    """Quantised weights with exact keys, exact weights with keys of half precision."""
    for quantization in ("none", "int4"):
        talk = Conversation(QUANTISED_CASES["plain"], STRANGERS[:20])
        loaded = load(library, talk.config, quantization=quantization, kv_dtype=kv_dtype)
        assert loaded.kv.dtype == kv_dtype
        forward = talk.forward(loaded)
        ours = talk.run(forward, [talk.all_at_once()])
        forward.close()
        oracle = load(None, talk.config, quantization=quantization, kv_dtype=kv_dtype)
        expected = talk.run(talk.forward(oracle), [talk.all_at_once()])
        far = distances(ours, expected)
        if quantization == "none" or not library.has_tiles():
            assert np.mean(far < EXACT) > 0.8  # a key on the edge of two halves is a flip, too
        assert far.max() < FLIPS


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_likeliest_tokens_of_a_mask_are_those_of_the_logits_with_the_others_taken_out(library, quantization, threads):
    talk = Conversation(QUANTISED_CASES["plain"], LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization=quantization, threads=threads))
    width, rng = talk.config.vocab_size, np.random.default_rng(0)
    hidden = rng.standard_normal((67, talk.config.hidden_size)).astype(np.float32)
    few, many = (rng.random((2, 40, width)) < 0.02), (rng.random((40, width)) < 0.9)
    for rows, flags in ((1, many), (5, few[0]), (67, many), (67, few[1])):
        masked = np.arange(0, rows, 2)
        words = np.packbits(flags[: len(masked)], axis=1, bitorder="little")
        words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).view(np.uint32)
        logits = forward.logits(hidden[:rows]).copy()
        logits[masked] = np.where(flags[: len(masked)], logits[masked], -np.inf)
        expected = np.where(logits.max(-1) > -np.inf, logits.argmax(-1), NOTHING_LEFT_ID)
        assert forward.likeliest(hidden[:rows], Masks(masked, words)).tolist() == expected.tolist()
    forward.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_likeliest_tokens_are_those_of_the_logits(library, quantization, threads):
    talk = Conversation(QUANTISED_CASES["plain"], LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization=quantization, threads=threads))
    hidden = np.random.default_rng(0).standard_normal((67, talk.config.hidden_size)).astype(np.float32)
    for rows in (1, 5, 67):
        assert forward.likeliest(hidden[:rows]).tolist() == forward.logits(hidden[:rows]).argmax(-1).tolist()
    assert forward.likeliest(np.zeros_like(hidden[:5])).tolist() == [0] * 5  # of equal ones the first, whoever found it
    hidden[[3, 66], 5] = np.nan, np.inf
    found = forward.likeliest(hidden)
    assert np.flatnonzero(found == -1).tolist() == [3, 66]
    forward.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_of_equal_tokens_the_first_is_taken_whichever_member_found_it(library, quantization):
    """A vocabulary so large that every member has a part of it."""
    talk = Conversation(replace(QUANTISED_CASES["plain"], vocab_size=20_000), LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization=quantization, threads=3))
    for _ in range(3):
        assert forward.likeliest(np.zeros((67, talk.config.hidden_size), np.float32)).tolist() == [0] * 67
    forward.close()


def test_a_decoder_that_nobody_closes_ends_its_threads_before_its_memory_goes(library, monkeypatch):
    """Else they may look at the last job while the process ends: one exit in about 200 was a segmentation fault."""
    ended, free = [], library.free
    monkeypatch.setattr(library, "free", lambda runner: (ended.append(runner), free(runner)))
    talk = Conversation(next(iter(EXACT_CASES.values())), [3])
    forward = talk.forward(load(library, talk.config, quantization="none", kv_dtype="float32", threads=2))
    talk.run(forward, some_steps([3]))
    assert not ended
    del forward, talk
    gc.collect()
    assert len(ended) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_advances_the_progress_word_in_every_layer(library, threads):
    talk = Conversation(QUANTISED_CASES["everything"], LENGTHS)
    forward = talk.forward(load(library, talk.config, quantization="int8", threads=threads))
    word = ProgressWord.create()
    talk.run(forward, [[part] for part in talk.all_at_once()][:1])
    assert word.value == 0, "nobody has told it of the word"
    forward.report_progress(word)
    seen = [word.value]
    for part in talk.all_at_once():
        talk.run(forward, [[part]])
        seen.append(word.value)
    assert all(after - before >= talk.config.layers for before, after in pairwise(seen))
    forward.close()
    word.close()
