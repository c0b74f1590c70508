"""The operations that torch is asked for, and the number that names its arithmetic (worker/arithmetic.py), change together.

Another number means other keys for every block that is stored: it may change only where operations do, and must where they do.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch_golden import CASES, VERSION, Operations, digest_of, written

from baton.models.layers.norm import RMSNorm
from baton.worker.arithmetic import TORCH

HOW = "python tests/worker/torch_golden.py --write"


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_of_the_number(name):
    entries = written().get(VERSION)
    if not entries:
        pytest.skip(f"no digests for torch {VERSION} are written down: run {HOW} and commit torch_golden.json")
    assert digest_of(CASES[name]) == entries[-1]["digests"][name], (
        f"the decoder asks torch for other operations than those of arithmetic {TORCH}. If that is meant, run {HOW} and set "
        f"TORCH in worker/arithmetic.py to {TORCH + 1}; else the change is a mistake"
    )


def test_the_number_is_the_last_one_that_was_written_down():
    for version, entries in written().items():
        numbers = [entry["arithmetic"] for entry in entries]
        assert numbers[-1] == TORCH, version
        assert numbers == list(range(numbers[0], TORCH + 1)), version
        assert all(before["digests"] != after["digests"] for before, after in pairwise(entries)), version


def test_another_order_of_the_same_arithmetic_is_noticed(monkeypatch):
    before = digest_of(CASES["float32"])

    def weight_first(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x) * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    monkeypatch.setattr(RMSNorm, "forward" if "forward" in vars(RMSNorm) else "__call__", weight_first)
    assert digest_of(CASES["float32"]) != before


def recorded(work) -> str:
    with torch.inference_mode(), Operations() as operations:
        work(torch.arange(6.0))
    return operations.hexdigest()


def test_a_view_by_another_name_is_the_same_operation():
    assert recorded(lambda x: x.view(2, 3).t() + 1) == recorded(lambda x: x.reshape(2, 3).transpose(0, 1) + 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + x,
        lambda x: x * 3,
        lambda x: x.flip(0) * 2,
        lambda x: x.double() * 2,
        lambda x: x[1:] * 2,
        lambda x: x.mul_(2),
    ],
)
def test_operands_constants_and_types_count(other):
    assert recorded(other) != recorded(lambda x: x * 2)
