"""Every GGUF type gives, bit for bit, the numbers of the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest

from baton.models.dequantise import CHUNK_ELEMENTS, dequantise, dequantise_into
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F64, TENSOR_TYPES

gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package (pip install 'baton-serve[oracle]')")

TYPES = {kind.name: kind for kind in (F64, *TENSOR_TYPES.values())}
# Byte offsets of the float16 scales of a block, which must be finite; all other bytes may be anything.
SCALES_AT = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)} | {
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def any_blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Random bytes, so that every bit of every field is used, with random finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, TYPES[name].block_bytes), dtype=np.uint8)
    for at in SCALES_AT[name]:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


def ours(raw: np.ndarray, name: str) -> np.ndarray:
    kind = TYPES[name]
    blocks = raw.reshape(-1, kind.block_bytes)
    return dequantise(RawTensor(kind, (len(blocks), kind.block_elements), blocks))


def theirs(raw: np.ndarray, name: str) -> np.ndarray:
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", SCALES_AT)
@pytest.mark.parametrize("count", [1, 7, 333])
def test_any_bytes_become_the_same_numbers(name, count):
    raw = any_blocks(name, count, seed=count)
    assert np.array_equal(ours(raw, name), theirs(raw, name))


def test_more_than_a_chunk():
    raw = any_blocks("Q4_1", CHUNK_ELEMENTS // 32 + 3, seed=1)
    assert np.array_equal(ours(raw, "Q4_1"), theirs(raw, "Q4_1"))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_quantised_numbers_come_back(name):
    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    back = ours(raw.view(np.uint8), name).reshape(values.shape)
    assert np.array_equal(back, theirs(raw, name))
    tolerance = {"Q4": 0.35, "Q5": 0.2, "Q8": 0.02}.get(name[:2], 0.01)
    assert np.abs(back - values).max() < tolerance


def test_the_table_of_types_is_the_packages():
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block_elements, kind.block_bytes)


def test_into_memory_that_is_there():
    blocks = any_blocks("Q4_1", 6, seed=2)
    raw = RawTensor(TYPES["Q4_1"], (3, 64), blocks.reshape(3, -1))
    out = np.full((3, 64), np.nan, np.float32)
    dequantise_into(raw, out)
    assert np.array_equal(out, dequantise(raw))
    with pytest.raises(ValueError, match="dense"):
        dequantise_into(raw, np.empty((64, 3), np.float32).T)


def test_plain_numbers_at_any_byte():
    """A safetensors table may have any length, so what follows it may begin anywhere."""
    values = np.random.default_rng(0).normal(size=(4, 8))
    for name, stored in (("F64", values), ("F32", values.astype(np.float32)), ("F16", values.astype(np.float16))):
        odd = np.empty(stored.nbytes + 1, np.uint8)[1:]
        odd[:] = stored.view(np.uint8).reshape(-1)
        assert np.array_equal(ours(odd, name).reshape(4, 8), stored.astype(np.float32))


def test_bytes_that_are_not_the_shape():
    with pytest.raises(ValueError, match="Q4_1 of shape"):
        RawTensor(TYPES["Q4_1"], (3, 64), np.zeros((3, 39), np.uint8))
