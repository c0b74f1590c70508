"""Weights in 8 bits (e4m3): every block of 128 outputs and 128 inputs has a scale, so its largest weight is the largest number
of the format. Activations stay as they are: a product unpacks weights on its way to the tensor cores (gemv.py, skinny_gemm.py).

For many rows, whose products are bound by arithmetic, `unpack` writes the matrix out for cuBLAS.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv

SIDE = 128
LARGEST = 448.0
FP8 = torch.float8_e4m3fn


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [outputs, inputs], multiples of 128 -> the same in fp8, and scales float32 [outputs / 128, inputs / 128]."""
    outputs, inputs = weight.shape
    packed = torch.empty(outputs, inputs, dtype=FP8, device=weight.device)
    scales = torch.empty(outputs // SIDE, inputs // SIDE, dtype=torch.float32, device=weight.device)
    step = max(1, (64 << 20) // (SIDE * inputs))  # a part at a time: in float32 it would be large
    for at in range(0, outputs // SIDE, step):
        blocks = weight[at * SIDE : (at + step) * SIDE].float().view(-1, SIDE, inputs // SIDE, SIDE)
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
        scales[at : at + step] = scale
        rounded = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
        packed[at * SIDE : (at + step) * SIDE] = rounded.view(-1, inputs).to(FP8)
    return packed, scales


@triton.jit
def _unpack(packed, scales, out, inputs, SIDE: tl.constexpr):
    block, of = tl.program_id(0), tl.program_id(1)
    row = block * SIDE + tl.arange(0, SIDE)
    at = row.to(tl.int64)[:, None] * inputs + (of * SIDE + tl.arange(0, SIDE))[None, :]
    scale = tl.load(scales + block * tl.num_programs(1) + of)
    tl.store(out + at, (tl.load(packed + at).to(tl.float32) * scale).to(out.dtype.element_ty))


def unpack(packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """As quantise() made them -> out [outputs, inputs]."""
    outputs, inputs = packed.shape
    _unpack[(cdiv(outputs, SIDE), cdiv(inputs, SIDE))](packed, scales, out, inputs, SIDE=SIDE, num_warps=8)
