"""Number formats of files: names and sizes.

The arithmetic is in dequantise.py and quantise.py. A quantised row consists of blocks of `block_elements` values; a block has
its own scales and takes `block_bytes` bytes. A plain number is a block of one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    number: int
    "Number of the type in a GGUF file. Negative: not in GGUF files."
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        return elements // self.block_elements * self.block_bytes


F64 = TensorType(28, "F64", 1, 8)
F32 = TensorType(0, "F32", 1, 4)
F16 = TensorType(1, "F16", 1, 2)
BF16 = TensorType(30, "BF16", 1, 2)
F8_E4M3 = TensorType(-1, "F8_E4M3", 1, 1)
U8 = TensorType(-2, "U8", 1, 1)
"""Type of single bytes: parts of MXFP4 in safetensors (loaders/stacked_experts.py)."""
I32 = TensorType(-3, "I32", 1, 4)
I64 = TensorType(-4, "I64", 1, 8)
"""Types of parts of matrices in 4 bits (loaders/packed_int4.py): words of eight numbers, and shapes."""
Q4_0 = TensorType(2, "Q4_0", 32, 18)
Q4_1 = TensorType(3, "Q4_1", 32, 20)
Q5_0 = TensorType(6, "Q5_0", 32, 22)
Q5_1 = TensorType(7, "Q5_1", 32, 24)
Q8_0 = TensorType(8, "Q8_0", 32, 34)
Q4_K = TensorType(12, "Q4_K", 256, 144)
Q5_K = TensorType(13, "Q5_K", 256, 176)
Q6_K = TensorType(14, "Q6_K", 256, 210)
MXFP4 = TensorType(39, "MXFP4", 32, 17)

TENSOR_TYPES: dict[int, TensorType] = {
    kind.number: kind for kind in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4)
}
"""Types supported in GGUF files, by their number."""

SCALE_BLOCK = 128
"""Number of rows and columns of an fp8 matrix that share a scale."""
