"""What a product must give: in float64, from the stored bytes, without any code of ours. And how far off float32 may be.

bytes    (weights of 8 bits) both rows are mixed: times Hadamard's matrix and reflections (`mixing_matrix`). Then each is
         rounded as a whole: scale = largest magnitude / 127, number = rint(value * 127 / largest).
         output = scale * weight scale * (numbers . numbers) / stretch
groups   (4 bits, and 8 bits of an output head) a row of activations is rounded in groups of 32: scale and number likewise,
         both worked out in float32; with 8159 in place of 127 where the bits of the largest magnitude, as an integer, are more
         than 9 * 2^19 above the mean of the row's groups (which count as no less than 16 octaves below the largest), and in
         all groups before a head.
         output = sum over groups of  scale * weight scale * (numbers . weights)  [+ minimum * scale * sum]
wholes   (4 bits, on tiles) a row of activations is rounded as a whole, with 32639 in place of 127, to 256 * high + low. In
         units that are the same for a segment of a weight's row, the weight is  step * (nibble - 8) + centre.
         output = 256 * scale * sum over segments of  unit * (high . weights + low . coarse)
         coarse = (floor(step / 16) * (nibble - 8) + floor(centre / 16)) / 16
         MXFP4 has its doubled numbers in place of (nibble - 8), no centre, and steps of 128 and less: powers of two, or 0
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.models.dequantise import dequantise
from baton.models.raw_tensor import Floats, RawTensor
from baton.models.tensor_types import BF16, F16, F32, MXFP4, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TensorType

GROUP = 32
SEGMENT = 18
"""Groups that share a unit."""
UNIT = 2.0**-24
"""Of rounding to float32."""

Doubles = NDArray[np.float64]
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float64)
"""Twice the numbers that the four bits of MXFP4 stand for: then their scale is 2^(exponent - 128)."""


class Product(NamedTuple):
    values: Doubles
    error_max: Doubles
    "A bound: as many roundings as a chain has links, each of at most the sum of all magnitudes."


class Groups(NamedTuple):
    """A row in groups: value = scale * number + minimum. Numbers: [rows, groups, 32], the others [rows, groups]."""

    scales: Doubles
    numbers: Doubles
    minima: Doubles


def random_matrix(rng: np.random.Generator, kind: TensorType, rows: int, width: int) -> RawTensor:
    """Any bytes that a file could hold, with scales that keep the results near 1."""
    if kind == F32:
        return RawTensor.of_floats(rng.standard_normal((rows, width), np.float32) / np.float32(width**0.5))
    blocks = width // GROUP
    numbers = rng.integers(0, 256, (rows, blocks, kind.block_bytes), np.uint8)
    if kind == MXFP4:
        numbers[:, :, 0] = 124 - int(np.log2(width) / 2) - rng.integers(0, 10, (rows, blocks))
        return RawTensor(kind, (rows, width), numbers.reshape(rows, -1))
    size = {Q8_0: 127, Q4_0: 8, Q4_1: 8}[kind] * width**0.5
    halves = rng.standard_normal((rows, blocks, 2)) / size
    if kind == Q4_1:
        halves[:, :, 1] = -8 * halves[:, :, 0]
    at = 4 if kind == Q4_1 else 2
    numbers[:, :, :at] = halves.astype(np.float16).view(np.uint8)[:, :, :at]
    return RawTensor(kind, (rows, width), numbers.reshape(rows, -1))


SCALES_AT = {
    kind: places for kinds, places in (((Q5_0,), (0,)), ((Q5_1, Q4_K, Q5_K), (0, 2)), ((Q6_K,), (208,))) for kind in kinds
}


def random_stored(rng: np.random.Generator, kind: TensorType, rows: int, width: int) -> RawTensor:
    """The same for every type that a file may have."""
    if kind in (F32, Q8_0, Q4_0, Q4_1, MXFP4):
        return random_matrix(rng, kind, rows, width)
    if kind in (F16, BF16):
        values = rng.standard_normal((rows, width), np.float32)
        words = values.astype(np.float16).view(np.uint16) if kind == F16 else (values.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor(kind, (rows, width), words.view(np.uint8))
    blocks = rng.integers(0, 256, (rows, width // kind.block_elements, kind.block_bytes), np.uint8)
    for at in SCALES_AT[kind]:
        blocks[:, :, at : at + 2] = (rng.standard_normal((*blocks.shape[:2], 1)) / 500).astype(np.float16).view(np.uint8)
    return RawTensor(kind, (rows, width), blocks.reshape(rows, -1))


def weight_groups(raw: RawTensor) -> Groups:
    blocks = raw.data.reshape(raw.shape[0], -1, raw.type.block_bytes)
    if raw.type == MXFP4:
        doubled = DOUBLED[np.concatenate((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), -1)]
        return Groups(np.exp2(blocks[:, :, 0] - 128.0), doubled, np.zeros(blocks.shape[:2]))
    scales = blocks[:, :, :2].copy().view(np.float16)[:, :, 0].astype(np.float64)
    minima = np.zeros_like(scales)
    if raw.type == Q8_0:
        return Groups(scales, blocks[:, :, 2:].view(np.int8).astype(np.float64), minima)
    at = 4 if raw.type == Q4_1 else 2
    if raw.type == Q4_1:
        minima = blocks[:, :, 2:4].copy().view(np.float16)[:, :, 0].astype(np.float64)
    nibbles = np.concatenate((blocks[:, :, at:] & 15, blocks[:, :, at:] >> 4), -1).astype(np.float64)
    return Groups(scales, nibbles - (8 if raw.type == Q4_0 else 0), minima)


def wide_groups(largest: Floats) -> NDArray[np.bool_]:
    """Of the largest magnitudes of groups [rows, groups]: which have numbers of two bytes."""
    bits = np.ascontiguousarray(largest).view(np.int32).astype(np.int64)
    mean = np.maximum(bits, bits.max(-1, keepdims=True) - (16 << 23)).sum(-1, keepdims=True) // bits.shape[-1]
    return bits > mean + (9 << 19)


def activation_groups(x: Floats, *, all_wide: bool = False) -> Groups:
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1)
    most = np.where(wide_groups(largest) | all_wide, np.float32(8159), np.float32(127))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = most / largest
    inverse[~np.isfinite(inverse)] = 0
    scales, numbers = largest / most, np.rint(groups * inverse[:, :, None])
    return Groups(scales.astype(np.float64), numbers.astype(np.float64), np.zeros(scales.shape))


def whole_rows(x: Floats) -> tuple[Doubles, Doubles, Doubles]:
    """Scales [rows], high and low [rows, width]."""
    largest = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(32639) / largest
    inverse[~np.isfinite(inverse)] = 0
    numbers = np.rint(x * inverse[:, None]).astype(np.float64)
    high = np.floor((numbers + 128) / 256)
    return (largest / np.float32(32639)).astype(np.float64), high, np.maximum(numbers - 256 * high, -127)


def whole_segment(groups: Groups, kind: TensorType) -> tuple[Doubles, Doubles, Doubles]:
    """Units [rows], weights and coarse ones [rows, width] of one segment."""
    if kind == MXFP4:
        most = groups.scales.max(1)
        steps = np.floor(128 * groups.scales / most[:, None])[:, :, None]
        doubled, coarse = steps * groups.numbers, np.floor(steps / 16) * groups.numbers / 16
        return most / 128, doubled.reshape(len(most), -1), coarse.reshape(len(most), -1)
    scales, minima = groups.scales.astype(np.float32), groups.minima.astype(np.float32)
    nibbles = groups.numbers - (0 if kind == Q4_0 else 8)
    centres = minima + np.float32(8) * scales if kind == Q4_1 else minima
    turned = scales < 0  # 15 - nibble is meant
    nibbles, centres = np.where(turned[:, :, None], -1 - nibbles, nibbles), np.where(turned, centres - scales, centres)
    scales = np.abs(scales)
    units = np.maximum(scales / np.float32(255), (np.float32(8) * scales + np.abs(centres)) / np.float32(2000)).max(1)
    steps, offsets = (np.rint(part * _inverses(units))[:, :, None] for part in (scales, centres))
    weights, uppers = steps * nibbles + offsets, np.floor(steps / 16) * nibbles + np.floor(offsets / 16)
    assert np.abs(uppers).max() <= 127
    return units.astype(np.float64), weights.reshape(len(units), -1), uppers.reshape(len(units), -1) / 16


def _inverses(units: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / units
    return np.where(np.isfinite(inverse), inverse, np.float32(0))[:, None]


def whole_product(x: Floats, raw: RawTensor) -> Product:
    (scales, high, low), groups = whole_rows(x), weight_groups(raw)
    values = magnitudes = np.zeros((len(x), raw.shape[0]))
    for at in range(0, raw.shape[1] // GROUP, SEGMENT):
        units, weights, coarse = whole_segment(Groups(*(part[:, at : at + SEGMENT] for part in groups)), raw.type)
        here = slice(at * GROUP, (at + SEGMENT) * GROUP)
        whole = high[:, here] @ weights.T + np.floor(low[:, here] @ coarse.T)
        values = values + whole * 256 * scales[:, None] * units
        magnitudes = magnitudes + np.abs(whole) * 256 * scales[:, None] * units
    return Product(values, (5 + raw.shape[1] // GROUP // SEGMENT) * UNIT * magnitudes)


def mixing_matrix(width: int) -> Doubles:
    """Times its own transpose it is `stretch` times the identity."""
    stretch, matrix = width & -width, np.ones((1, 1))
    while len(matrix) < stretch:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    for factor in (3, 5, 7, 9, 11, 13):
        while width // len(matrix) % factor == 0:
            matrix = np.kron(np.eye(factor) - 2 / factor, matrix)
    return np.kron(np.eye(width // len(matrix)), matrix)


def byte_rows(x: Floats, balance: Floats) -> tuple[Doubles, Doubles, Doubles]:
    """Scales [rows], numbers [rows, width], and how many of a row's numbers may be the next one: they are near an edge."""
    mixed = (x * balance).astype(np.float64) @ mixing_matrix(x.shape[1]).T
    largest = np.abs(mixed).max(-1)
    exact = mixed * np.divide(127.0, largest, out=np.zeros_like(largest), where=largest > 1e-36)[:, None]
    on_edge = np.abs(np.abs(exact - np.floor(exact)) - 0.5) < 127 * 64 * UNIT
    return largest / 127, np.rint(exact), on_edge.sum(-1)


def bytes_product(x: Floats, raw: RawTensor, balance: Floats | None = None) -> Product:
    balance = np.ones(x.shape[1], np.float32) if balance is None else balance
    (scales, numbers, edges), (units, weights, weight_edges) = byte_rows(x, balance), byte_rows(dequantise(raw), 1 / balance)
    ones = scales[:, None] * units / (x.shape[1] & -x.shape[1])
    flips = 127.0 * (edges[:, None] + weight_edges)
    values = numbers @ weights.T * ones
    return Product(values, 64 * UNIT * np.abs(values) + flips * ones)


def product(x: Floats, raw: RawTensor, bias: Floats | None = None, *, tiles: bool = False, grouped: bool = False) -> Product:
    """`tiles`: of a library that has them. `grouped`: bytes keep their groups."""
    if raw.type == F32:
        w = raw.data.view(np.float32).astype(np.float64)
        values, magnitudes, links = x.astype(np.float64) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T, raw.shape[1]
    elif (raw.type == Q8_0 and not grouped) or tiles:
        values, errors = (bytes_product if raw.type == Q8_0 else whole_product)(x, raw)
        magnitudes, links = errors / UNIT, 0
    else:
        a, w = activation_groups(x, all_wide=grouped), weight_groups(raw)
        dots = np.einsum("rgi,ogi->rog", a.numbers, w.numbers) * a.scales[:, None] * w.scales
        offsets = (a.numbers.sum(-1) * a.scales)[:, None] * w.minima
        values, magnitudes = (dots + offsets).sum(-1), (np.abs(dots) + np.abs(offsets)).sum(-1)
        links = 2 * dots.shape[-1] + 2  # the scales are multiplied, too
    if bias is not None:
        values, magnitudes, links = values + bias, magnitudes + np.abs(bias), links + 1
    return Product(values, (links + 1) * UNIT * magnitudes)


def gated(both: Product, activation: str = "silu") -> Product:
    """silu(gate) * up of outputs that are gates first and then what they let through; or gpt-oss' variant of it."""
    (gate, up), (gate_error, up_error) = (np.split(part, 2, axis=1) for part in both)
    if activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0) + 1.0
        swish = gate / (1 + np.exp(-1.702 * gate))
        from_gate, from_up = 1.1 * gate_error * (np.abs(up) + up_error), up_error * np.abs(swish)
        return Product(swish * up, from_gate + from_up + 12 * UNIT * (np.abs(swish * up) + np.abs(swish)))
    silu = gate / (1 + np.exp(-gate))
    # The slope of silu is at most 1.1; its own exponential and division take a few roundings.
    from_gate, from_up = 1.1 * gate_error * (np.abs(up) + up_error), up_error * np.abs(silu)
    return Product(silu * up, from_gate + from_up + 8 * UNIT * np.abs(silu * up))
