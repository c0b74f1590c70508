"""Weights in 8 bits (e4m3): every output has a scale, so its largest weight is the largest number of the format. Activations
stay as they are: a product unpacks weights on its way to the tensor cores, and scales its sums (gemv.py, skinny_gemm.py).

For many rows, whose products are bound by arithmetic, `unpack` writes the matrix out for cuBLAS.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv

ALIGNED = 16
"""Inputs are a multiple of it: so a row of bytes can be read in whole words."""
LARGEST = 448.0
FP8 = torch.float8_e4m3fn
BLOCK = 2048


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [outputs, inputs] -> the same in fp8, and scales float32 [outputs]."""
    packed = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, (64 << 20) // weight.shape[1])  # a part at a time: in float32 it would be large
    for part in (slice(at, at + step) for at in range(0, len(weight), step)):
        values = weight[part].float()
        scales[part] = values.abs().amax(1).clamp(min=1e-12) / LARGEST
        packed[part] = (values / scales[part, None]).clamp(-LARGEST, LARGEST).to(FP8)
    return packed, scales


@triton.jit
def _unpack(packed, scales, out, inputs, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * inputs + at
    values = tl.load(packed + place, mask=at < inputs, other=0.0).to(tl.float32) * tl.load(scales + row)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=at < inputs)


def unpack(packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """As quantise() made them -> out [outputs, inputs]."""
    outputs, inputs = packed.shape
    _unpack[(outputs, cdiv(inputs, BLOCK))](packed, scales, out, inputs, BLOCK=BLOCK, num_warps=4)
