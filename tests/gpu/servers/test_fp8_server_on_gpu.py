"""Checkpoints in fp8, served whole on the GPU with --deterministic.

Where that unpacks matrices, every bit is that of plain weights. Experts in fp8 are multiplied as they are where their sizes
allow it: then sums are taken in another order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_fp8_server import EXPERTS, WIDE, compare, expected, folders, make_both, served  # noqa: F401

IN_8_BITS = {**WIDE, **EXPERTS, "hidden_size": 192, "moe_intermediate_size": 320}
SETTINGS = {"quantization": "none", "kv_blocks": 128, "block_size": 16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_unpacked_weights(folders: tuple[Path, Path], tmp_path: Path, dtype: str):  # noqa: F811
    packed, plain = folders
    settings = {**SETTINGS, "dtype": dtype}
    assert served(packed, tmp_path, settings) == expected(plain, settings)


def test_experts_that_stay_in_8_bits(tmp_path: Path):
    packed, plain = make_both(tmp_path, IN_8_BITS)
    compare(served(packed, tmp_path / "server", SETTINGS), expected(plain, SETTINGS), 1e-4)
