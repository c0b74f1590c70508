"""The bits that the kernels compute, and the number that says which they are (worker/arithmetic.py), change together.

Another number means other keys for every block that is stored: it may change only where bits do, and must where they do.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_model import CASES, digest_of, digests_of, numbers_without_bits, runnable_variants, with_digests, written
from kernels import load

from baton.models.rotary import RotaryTable
from baton.native import decoder
from baton.native.library import Library
from baton.native.variants import VARIANTS, supported_variants
from baton.worker.arithmetic import NATIVE, native_arithmetic, native_key

HOW = "python tests/native/golden_model.py --write"


OWN = {native_key(variant) for variant in supported_variants()}
STAND_INS = {native_key(variant): variant for variant in runnable_variants() if variant not in supported_variants()}
OTHERS = [pytest.param(key, marks=pytest.mark.slow if key in STAND_INS else ()) for key in sorted(NATIVE.keys() - OWN)]


def test_bits_are_those_of_the_number(library):
    check_bits(library)


@pytest.mark.parametrize("key", OTHERS)
def test_so_they_are_of_variants_that_this_machine_can_stand_in_for(key):
    if key not in STAND_INS:
        pytest.skip(f"this processor can neither run {key} nor stand in for it")
    check_bits(load(STAND_INS[key]))


def check_bits(library: Library) -> None:
    key = native_key(library.variant)
    entries = written().get(key)
    if not entries:
        pytest.skip(f"no digests of {key} are written down: run {HOW} on this machine and commit golden.json")
    number, digests = entries[-1]["arithmetic"], digests_of(library)
    changed = [case for case, value in digests.items() if entries[-1]["digests"].get(case) != value]
    assert not changed, (
        f"the bits of {key} are not those of arithmetic {number}: {changed}. If that is meant, run {HOW} and set "
        f"NATIVE[{key!r}] in worker/arithmetic.py to {number + 1}; else the change is a mistake"
    )
    assert digests.keys() == entries[-1]["digests"].keys()


def test_the_numbers_are_the_last_ones_that_were_written_down():
    assert {key: entries[-1]["arithmetic"] for key, entries in written().items()} == NATIVE


def test_a_number_without_other_bits_is_none():
    """Every entry has other digests than the one before it, and the next number."""
    assert numbers_without_bits(written()) == []


@pytest.mark.parametrize(
    ("numbers", "digests"),
    [
        ([1, 2], [{"a": "1"}, {"a": "1"}]),
        ([1, 2, 3], [{"a": "1"}, {"a": "2"}, {"a": "2", "new": "3"}]),
        ([1, 3], [{"a": "1"}, {"a": "2"}]),
        ([2], [{"a": "1"}]),
    ],
)
def test_such_numbers_are_noticed(numbers, digests):
    made = [{"arithmetic": number, "digests": each} for number, each in zip(numbers, digests, strict=True)]
    assert numbers_without_bits({"fine": [{"arithmetic": 1, "digests": {"a": "1"}}], "k": made}) == [f"k: {numbers[-1]}"]


def test_variants_agree_where_they_say_so():
    """native/variants.py: those with vectors of one length have equal bits, but for weights of 4 bits on tiles, and for heads
    beside such weights."""
    last = {key: entries[-1]["digests"] for key, entries in written().items()}
    assert last["x86_64 avxvnni"] == last["x86_64 avx2"]
    assert last["aarch64 i8mm"] == last["aarch64 dotprod"]
    for case, digest in last["x86_64 amx"].items():
        of_4_bits = "int4" in case or case.startswith(("Q4_0", "Q4_1", "Q4_K", "MXFP4 as auto", "every kind as auto"))
        assert (digest == last["x86_64 avx512"].get(case)) != of_4_bits, case


def test_every_variant_has_a_number():
    machines = {variant.machine or machine for variant in VARIANTS for machine in ("x86_64", "aarch64")}
    keys = {native_key(variant, machine) for variant in VARIANTS for machine in machines if variant.machine in ("", machine)}
    assert keys == NATIVE.keys()
    plain = VARIANTS[-1]
    assert native_arithmetic(plain, "riscv64") == "native riscv64 plain 1"
    assert native_arithmetic(plain, "arm64") == native_arithmetic(plain, "aarch64")  # one processor, two systems


def test_one_bit_of_one_angle_is_noticed(library, monkeypatch):
    """The digests would be worth nothing if they missed a change as small as another math library makes."""

    class OneBitOff(RotaryTable):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.cosines[20, 3] = np.nextafter(self.cosines[20, 3], np.float32(2.0))

    case = CASES[0]
    before = digest_of(library, case)
    assert digest_of(library, case) == before
    monkeypatch.setattr(decoder, "RotaryTable", OneBitOff)
    assert digest_of(library, case) != before


def test_writing_down_raises_the_number_only_with_other_bits():
    first = with_digests([], {"a": "1"})
    assert first == [{"arithmetic": 1, "digests": {"a": "1"}}]
    assert with_digests(first, {"a": "1"}) == first
    assert with_digests(first, {"a": "1", "new": "2"}) == [{"arithmetic": 1, "digests": {"a": "1", "new": "2"}}]
    assert with_digests(first, {"a": "2"}) == [*first, {"arithmetic": 2, "digests": {"a": "2"}}]
    both = [{"arithmetic": 1, "digests": {"a": "1", "b": "1"}}]
    assert with_digests(both, {"a": "1"}) == first, "a case that is gone changes no bits"
