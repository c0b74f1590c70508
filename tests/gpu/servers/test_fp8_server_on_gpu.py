"""Checkpoints in fp8, served whole on the GPU: in --deterministic answers are those of the unpacked weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_fp8_server import answers_are_equal, folders  # noqa: F401


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_unpacked_weights(folders: tuple[Path, Path], tmp_path: Path, dtype: str):  # noqa: F811
    answers_are_equal(folders, tmp_path, dtype=dtype, block_size=16, kv_blocks=128)
