"""The bits that the GPU's kernels compute, and the number that says which they are (worker/arithmetic.py), change together."""

from __future__ import annotations

import pytest
from golden_on_gpu import CASES, GOLDEN, digest_of, key, numbers_without_bits, with_some_digests, written

from baton.worker.arithmetic import CUDA, cuda_arithmetic

HOW = f"python tests/gpu/golden_on_gpu.py tests/gpu/{GOLDEN.name}"


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_number(gpu, case):
    entries = written().get(key())
    if not entries:
        pytest.skip(f"no digests of {key()} are written down: run {HOW} and commit it")
    last = entries[-1]
    assert digest_of(*CASES[case]) == last["digests"].get(case), (
        f"the bits of {key()} are not those of arithmetic {last['arithmetic']}. If that is meant, run {HOW} and set CUDA in "
        f"worker/arithmetic.py to {last['arithmetic'] + 1}; else the change is a mistake"
    )


def test_they_are_the_same_twice(gpu):
    assert digest_of(*CASES["bfloat16"]) == digest_of(*CASES["bfloat16"])


def test_the_number_is_the_last_one_that_was_written_down():
    assert {entries[-1]["arithmetic"] for entries in written().values()} <= {CUDA}


def test_a_number_without_other_bits_is_none():
    """Every entry has other digests than the one before it, and the next number. Needs no GPU."""
    assert numbers_without_bits(written()) == []


def test_digests_that_come_one_by_one_raise_the_number_only_with_other_bits():
    """The first ones of the same bits, with the others missing, were another number."""
    first, second, *_ = CASES
    entries = [{"arithmetic": 1, "digests": {first: "1", second: "2"}}]
    assert with_some_digests(entries, {first: "1"}) == entries
    assert with_some_digests(entries, {first: "1", second: "2"}) == entries
    changed = with_some_digests(entries, {first: "1", second: "3"})
    assert changed == [*entries, {"arithmetic": 2, "digests": {first: "1", second: "3"}}]
    assert with_some_digests([], {first: "1"}) == [{"arithmetic": 1, "digests": {first: "1"}}]


def test_the_name_says_all_that_bits_depend_on():
    names = {
        cuda_arithmetic(gpu, libraries, fp8=fp8, deterministic=fixed)
        for gpu in ("NVIDIA H200", "NVIDIA H100")
        for libraries in ("torch 2.11 triton 3.6 cublas 13.0.2", "torch 2.11 triton 3.6 cublas 13.1.0")
        for fp8 in (False, True)
        for fixed in (False, True)
    }
    assert len(names) == 16
    assert all(name.startswith(f"cuda {CUDA} ") for name in names)
