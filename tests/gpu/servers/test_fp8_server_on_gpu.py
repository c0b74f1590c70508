"""Checkpoints in fp8, served whole on the GPU: with --deterministic, which unpacks, all bits are those of plain weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_fp8_server import expected, folders, served  # noqa: F401


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_unpacked_weights(folders: tuple[Path, Path], tmp_path: Path, dtype: str):  # noqa: F811
    packed, plain = folders
    settings = {"quantization": "none", "kv_blocks": 128, "block_size": 16, "dtype": dtype}
    assert served(packed, tmp_path, settings) == expected(plain, settings)
