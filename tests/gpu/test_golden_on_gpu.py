"""The bits that the GPU's kernels compute, and the number that says which they are (worker/arithmetic.py), change together."""

from __future__ import annotations

import pytest
from golden_on_gpu import CASES, GOLDEN, digest_of, key, written

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
