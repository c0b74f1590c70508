"""The tensor types a GGUF file may hold: numbers, names and block sizes. The arithmetic is in gguf_dequantise.py.

A quantised row is cut into blocks of `block_elements` values; a block shares its scales and takes `block_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    number: int
    "As the file says it."
    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    kind.number: kind
    for kind in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(30, "BF16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
    )
}
