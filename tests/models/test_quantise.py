"""Float32 to blocks and back: how much is lost, what is kept, and which weights become what."""

from __future__ import annotations

import time

import numpy as np
import pytest

from baton.models.dequantise import dequantise
from baton.models.parameters import EMBED, LM_HEAD
from baton.models.quantise import CHUNK_BLOCKS, ROW_MOST, SHRINKS, to_q4_1, to_q8_0, type_for, weights_as
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_1, Q8_0, TensorType

HALF_EPS = 2.0**-11
"""The largest relative error of rounding to float16."""


def matrix(rows: int = 6, width: int = 96, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32) * np.float32(scale)


def by_block(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 32)


def stored_as(kind: TensorType, rows: int = 4, width: int = 256) -> RawTensor:
    """Some tensor of this type."""
    blocks = np.random.default_rng(1).integers(0, 256, (rows, kind.row_bytes(width)), np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_1": (0, 2), "Q4_1": (0, 2), "Q4_0": (0,), "Q8_0": (0,)}.get(kind.name, ()):
        blocks.reshape(-1, kind.block_bytes)[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    if kind in (F32, F16, BF16):
        values = matrix(rows, width)
        bits = {F32: values, F16: values.astype(np.float16), BF16: (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        blocks = np.ascontiguousarray(bits).view(np.uint8)
    return RawTensor(kind, (rows, width), blocks)


# Q8_0


@pytest.mark.parametrize("scale", [1e-4, 0.02, 30.0])
def test_q8_0_is_off_by_half_a_step_at_most(scale):
    values = matrix(CHUNK_BLOCKS // 2, scale=scale)
    raw = to_q8_0(values)
    assert (raw.type, raw.shape, raw.data.shape) == (Q8_0, values.shape, (len(values), 3 * 34))
    step = np.abs(by_block(values)).max(1, keepdims=True) / 127
    # Half a step, and what rounding the step itself does to the 127th multiple of it (tiny steps are rounded more coarsely).
    allowed = 0.5 * step + 127 * np.maximum(step * HALF_EPS, 2.0**-25) + 1e-9
    assert (np.abs(by_block(dequantise(raw) - values)) <= allowed).all()


def test_q8_0_numbers_by_hand():
    values = np.zeros((1, 64), np.float32)
    values[0, :4] = [127.0, -126.5, 62.5, -0.4]  # d is 1: ties go to the even neighbour
    raw = to_q8_0(values)
    assert raw.data[0, :2].view(np.float16) == 1.0
    assert raw.data[0, 2:6].view(np.int8).tolist() == [127, -126, 62, 0]
    assert not raw.data[0, 34:].any()  # nothing but zeros: a scale of zero, no division by it
    assert np.isfinite(dequantise(raw)).all()


def test_numbers_too_small_for_a_scale_become_zeros():
    values = np.full((1, 32), 1e-9, np.float32)
    for quantised in (to_q8_0(values), to_q4_1(values)):
        assert np.abs(dequantise(quantised)).max() <= 1e-9


def test_q8_0_again_is_the_same():
    once = to_q8_0(matrix(100))
    assert np.array_equal(to_q8_0(dequantise(once)).data, once.data)


# Q4_1


def test_q4_1_is_off_by_half_a_step_and_what_is_cut():
    values = matrix(CHUNK_BLOCKS // 2)
    raw = to_q4_1(values)
    assert (raw.type, raw.shape, raw.data.shape) == (Q4_1, values.shape, (len(values), 3 * 20))
    blocks = by_block(values)
    width = np.ptp(blocks, axis=1)[:, None]
    allowed = width / 30 + max(SHRINKS) * width + 4 * np.abs(blocks).max(1, keepdims=True) * HALF_EPS
    assert (np.abs(by_block(dequantise(raw)) - blocks) <= allowed).all()


def test_the_search_for_a_range_pays(monkeypatch):
    def error(values):
        return np.square(by_block(dequantise(to_q4_1(values)) - values)).sum(1)

    values = matrix(2000)
    searched = error(values)
    monkeypatch.setattr("baton.models.quantise.SHRINKS", (0.0,))
    plain = error(values)
    assert (searched <= plain).all()  # block by block: the whole range is one of those tried
    assert searched.sum() < 0.95 * plain.sum()


def test_q4_1_again_is_the_same_within_float16():
    once = dequantise(to_q4_1(matrix(500)))
    again = dequantise(to_q4_1(once))
    assert np.allclose(again, once, rtol=0, atol=float(2 * HALF_EPS * np.abs(once).max()))


def test_q4_1_of_a_constant_block():
    values = np.full((2, 32), 0.3, np.float32)
    assert np.abs(dequantise(to_q4_1(values)) - 0.3).max() <= 0.3 * HALF_EPS


@pytest.mark.parametrize(("name", "quantise"), [("Q8_0", to_q8_0), ("Q4_1", to_q4_1)])
def test_the_gguf_package_reads_the_same_numbers_and_does_no_better(name, quantise):
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package (pip install 'baton-serve[oracle]')")
    kind = gguf.GGMLQuantizationType[name]
    values = matrix(200, scale=0.7)
    raw = quantise(values)
    ours = dequantise(raw)
    assert np.array_equal(ours, gguf.dequantize(raw.data, kind))
    theirs = gguf.dequantize(gguf.quantize(values, kind), kind)
    assert np.square(ours - values).sum() < 1.02 * np.square(theirs - values).sum()


def test_a_large_matrix_takes_no_time():
    values = matrix(1024, 4096)
    for quantise, seconds in ((to_q8_0, 1.0), (to_q4_1, 2.5)):  # several times what it takes on a quiet machine
        begun = time.process_time()
        quantise(values)
        assert time.process_time() - begun < seconds


# What becomes what

EVERY = (F32, F16, BF16, Q4_0, Q4_1, Q5_1, Q4_K, Q8_0)
LINEAR = "layers.0.mlp.up.weight"


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", [LINEAR, EMBED, LM_HEAD])
@pytest.mark.parametrize("quantization", ["auto", "int8", "int4", "none"])
def test_every_type_in_every_mode(kind, name, quantization):
    raw = stored_as(kind)
    ends, same = name != LINEAR, Q4_1 if kind == Q4_K else kind
    expected = {
        "none": F32,
        "int8": Q8_0,
        "int4": same if same in (Q4_0, Q4_1) else Q8_0 if ends else Q4_1,
        "auto": same if same in (Q4_0, Q4_1, Q8_0) else Q8_0,
    }[quantization]
    made = weights_as(raw, name, quantization)
    assert (made.type, made.shape) == (expected, raw.shape)
    if expected == kind:
        assert np.array_equal(made.data, raw.data)  # not a bit is touched
    before, after = dequantise(raw), dequantise(made)
    tolerance = {F32: 0.0, Q8_0: 0.005, Q4_1: 0.001 if kind == Q4_K else 0.07, Q4_0: 0.0}[expected]
    assert np.abs(after - before).max() <= tolerance * np.abs(before).max()


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_vectors_and_odd_rows_stay_float32(quantization):
    for values in (np.ones(64, np.float32), matrix(4, 42), matrix(4, 33)):
        assert weights_as(RawTensor.of_floats(values), "layers.0.mlp_norm.weight", quantization).type == F32
    half = matrix(4, 42).astype(np.float16)
    raw = RawTensor(F16, half.shape, half.view(np.uint8))
    assert np.array_equal(dequantise(weights_as(raw, LINEAR, quantization)), half.astype(np.float32))


def test_float32_is_not_copied_but_put_straight():
    raw = stored_as(F32)
    assert np.shares_memory(weights_as(raw, LINEAR, "none").data, raw.data)
    odd = np.empty(raw.data.size + 1, np.uint8)[1:].reshape(raw.data.shape)
    odd[:] = raw.data
    assert odd.ctypes.data % 4
    straight = weights_as(RawTensor(F32, raw.shape, odd), LINEAR, "none")
    assert straight.data.ctypes.data % 4 == 0
    assert np.array_equal(straight.data, raw.data)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_rows_that_are_too_long_for_sums_of_32_bits_stay_exact(quantization):
    widths = {ROW_MOST: Q4_1 if quantization == "int4" else Q8_0, ROW_MOST + 32: F32}
    for width, kind in widths.items():
        raw = RawTensor.of_floats(np.zeros((1, width), np.float32))
        assert type_for(raw, "layers.0.mlp.down.weight", quantization) == kind


@pytest.mark.parametrize("name", ["layers.0.mlp.router.weight", "layers.3.mlp.shared_gate.weight"])
@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_what_is_not_computed_in_blocks_is_not_rounded(name, quantization):
    assert type_for(stored_as(BF16), name, quantization) == F32
