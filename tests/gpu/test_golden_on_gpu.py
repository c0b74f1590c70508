"""The bits that the GPU's kernels compute, and the number that says which they are (worker/arithmetic.py), change together."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from golden_cases import CASES, NUMBERS
from golden_interpreted import Interpreter
from golden_on_gpu import GOLDEN, digest_of, gpu_key, kind_of, missing, with_some_digests, written, wrong_numbers

from baton.worker.arithmetic import CUDA, CUDA_FLOAT32, cuda_arithmetic

HOW = f"python tests/gpu/golden_on_gpu.py tests/gpu/{GOLDEN.name}"
QUICK = ("BERT with classes", "ModernBERT")
INTERPRETED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
interpreted = pytest.mark.skipif(
    Path("/dev/nvidia0").exists(), reason="Triton's interpreter and compiler do not share a process"
)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_number(gpu, case):
    entries = written().get(gpu_key() + CASES[case].kind)
    if not entries or case not in entries[-1]["digests"]:
        pytest.skip(f"NO DIGEST of {case!r} on {gpu_key()} yet: run {HOW} and commit the file")
    last = entries[-1]
    assert digest_of(case) == last["digests"][case], (
        f"the bits of {gpu_key()} are not those of arithmetic {last['arithmetic']}. If that is meant, run {HOW} and set the "
        f"number in worker/arithmetic.py to {last['arithmetic'] + 1}; else the change is a mistake"
    )


@pytest.mark.parametrize("gpu_name", sorted({key.removesuffix(kind_of(key)) for key in written()}))
def test_every_case_has_a_digest(gpu_name):
    """Needs no GPU, so that every run of the tests says which cases nothing holds."""
    if lacking := missing(gpu_name):
        pytest.skip(
            f"NO DIGEST on {gpu_name} yet of {', '.join(map(repr, lacking))}: on that GPU run {HOW}, and commit the file"
        )


def test_every_digest_has_a_case():
    """A case under another name would be held by nothing, and nothing would say so."""
    last = {key: entries[-1]["digests"] for key, entries in written().items()}
    assert [name for names in last.values() for name in names if name not in CASES] == []
    assert all(CASES[name].kind == kind_of(key) for key, names in last.items() for name in names)


@pytest.mark.parametrize("case", ["bfloat16", "drafts, deterministic", "two ranks, shared expert"])
def test_they_are_the_same_twice(gpu, case):
    assert digest_of(case) == digest_of(case)


def test_the_number_is_the_last_one_that_was_written_down():
    assert all(entries[-1]["arithmetic"] == NUMBERS[kind_of(key)] for key, entries in written().items())


def test_a_number_without_other_bits_is_none():
    """Every entry has other digests than the one before it, and the next number. Needs no GPU."""
    assert wrong_numbers(written()) == []
    same = {"arithmetic": 2, "digests": {"bfloat16": "1"}}, {"arithmetic": 3, "digests": {"bfloat16": "1", "fp8": "2"}}
    assert wrong_numbers({"a GPU": list(same)}) == ["a GPU: 2"]


def test_digests_that_come_one_by_one_raise_the_number_only_with_other_bits():
    """The first ones of the same bits, with the others missing, were another number."""
    first, second, new, *_ = CASES
    entries = [{"arithmetic": 1, "digests": {first: "1", second: "2"}}]
    assert with_some_digests(entries, {first: "1"}, 1) == entries
    assert with_some_digests(entries, {first: "1", second: "2"}, 1) == entries
    changed = with_some_digests(entries, {first: "1", second: "3"}, 1)
    assert changed == [*entries, {"arithmetic": 2, "digests": {first: "1", second: "3"}}]
    assert with_some_digests(entries, {new: "4"}, 1) == [{"arithmetic": 1, "digests": {first: "1", second: "2", new: "4"}}]
    assert with_some_digests([], {first: "1"}, 3) == [{"arithmetic": 3, "digests": {first: "1"}}]


def test_the_name_says_all_that_bits_depend_on():
    names = {
        cuda_arithmetic(gpu, libraries, dtype=dtype, fp8=fp8, deterministic=fixed)
        for gpu in ("NVIDIA H200", "NVIDIA H100")
        for libraries in ("torch 2.11 triton 3.6 cublas 13.0.2", "torch 2.11 triton 3.6 cublas 13.1.0")
        for fp8 in (False, True)
        for fixed in (False, True)
        for dtype in ("bfloat16", "float32")
    }
    assert len(names) == 32
    assert all(name.startswith(f"cuda {CUDA_FLOAT32 if 'float32' in name else CUDA} ") for name in names)


@interpreted
@pytest.mark.parametrize("case", INTERPRETED)
def test_every_case_runs_in_the_interpreter(case):
    assert len(digest_of(case, Interpreter())) == 24
