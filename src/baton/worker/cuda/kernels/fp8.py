"""Weights in 8 bits (e4m3), and their scales (`Scales`).

made here       (--quantization fp8) a scale per output maps its largest weight to the largest number of the format
checkpoints     have a scale per block of 128 outputs and 128 inputs

up to 32 rows   activations are not rounded: a product unpacks weights in registers (gemv.py, gemv_blocks.py, skinny_gemm.py)
more            activations are rounded to 8 bits too (fp8_rows.py), and the tensor cores multiply 8 bits with 8 bits
deterministic   `unpack` writes the matrix out, for the product with a fixed order
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv

ALIGNED = 16
"""Inputs must be a multiple of this, so that a row of bytes is read in whole words."""
LARGEST = 448.0
FP8 = torch.float8_e4m3fn
GROUP = 64
"""Outputs with common block scales, which are a tile of skinny_gemm.py."""
BLOCK_INPUTS = tl.constexpr(128)
STORED_BLOCK = 128
BLOCK = 2048


class Scales(NamedTuple):
    """The value of a weight is its number times `outputs` of its output, times `blocks` of its block if given."""

    outputs: torch.Tensor
    "float32 [outputs]."
    blocks: torch.Tensor | None = None
    "float32 [outputs / GROUP, inputs / 128], rounded up; at most 1, so that activations times it stay in float16's range."
    library: torch.Tensor | None = None
    "float32 [outputs / 128, inputs / 128] in cuBLAS' form, if it can multiply such a matrix."


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    """Quantise weight: [outputs, inputs] -> the same in fp8, with scales per output."""
    packed = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, (64 << 20) // weight.shape[1])  # in parts: the whole matrix in float32 would be large
    for part in (slice(at, at + step) for at in range(0, len(weight), step)):
        values = weight[part].float()
        scales[part] = values.abs().amax(1).clamp(min=1e-12) / LARGEST
        packed[part] = (values / scales[part, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return packed, Scales(scales)


def can_stack(sizes: Sequence[int], inputs: int) -> bool:
    """Whether matrices of these numbers of outputs, each with its own blocks, can be stacked: a group must not span two."""
    return inputs % ALIGNED == 0 and all(size % GROUP == 0 for size in sizes[:-1])


def scales_of_blocks(stored: Sequence[torch.Tensor], sizes: Sequence[int], inputs: int) -> Scales:
    """The scales for the kernels. stored: the block scales [blocks, blocks] of stacked matrices with `sizes` outputs
    (can_stack())."""
    groups = [
        scales.float().repeat_interleave(STORED_BLOCK // GROUP, 0)[: cdiv(size, GROUP)]
        for scales, size in zip(stored, sizes, strict=True)
    ]
    all_groups = torch.cat(groups)
    # A power of two, so that the division is exact.
    largest = torch.exp2(torch.ceil(torch.log2(all_groups.amax(1).clamp(min=1e-30))))
    blocks = (all_groups / largest[:, None]).contiguous()
    outputs = largest.repeat_interleave(GROUP)[: sum(sizes)].contiguous()
    library = None
    if _library_multiplies(outputs.device, sizes, inputs):
        library = torch.cat([scales.float() for scales in stored]).contiguous()
    return Scales(outputs, blocks, library)


def _library_multiplies(device: torch.device, sizes: Sequence[int], inputs: int) -> bool:
    """Whether cuBLAS multiplies these matrices. Only Hopper can; with a row of scales that is no multiple of four its results
    are wrong (torch 2.11, cuBLAS 13)."""
    whole = inputs % STORED_BLOCK == 0 and inputs // STORED_BLOCK % 4 == 0 and all(s % STORED_BLOCK == 0 for s in sizes[:-1])
    return whole and sizes[-1] % ALIGNED == 0 and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@triton.jit
def _unpack(packed, scales, blocks, out, inputs, BLOCKS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * inputs + at
    values = tl.load(packed + place, mask=at < inputs, other=0.0).to(tl.float32) * tl.load(scales + row)
    if BLOCKS:
        line = blocks + row // GROUP * ((inputs + BLOCK_INPUTS - 1) // BLOCK_INPUTS)
        values *= tl.load(line + at // BLOCK_INPUTS, mask=at < inputs, other=0.0)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=at < inputs)


def unpack(packed: torch.Tensor, scales: Scales, out: torch.Tensor) -> None:
    """Unpack a matrix [outputs, inputs] in fp8 -> out, of the same shape."""
    outputs, inputs = packed.shape
    blocks = scales.blocks
    _unpack[(outputs, cdiv(inputs, BLOCK))](
        *(packed, scales.outputs, scales.outputs if blocks is None else blocks, out, inputs),
        BLOCKS=blocks is not None,
        GROUP=GROUP,
        BLOCK=BLOCK,
        num_warps=4,
    )


def unpack_blocks(packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """A checkpoint's matrix and its block scales, as stored -> out, of the same shape. Used once, at load, without a kernel of
    ours. Products are computed in float32, then rounded to the type of `out`."""
    rows, inputs = packed.shape
    spread = scales.float().repeat_interleave(STORED_BLOCK, 1)[:, :inputs].repeat_interleave(STORED_BLOCK, 0)[:rows]
    out.copy_(spread.mul_(packed.float()))
