"""Weights in 8 bits (e4m3): every output has a scale, so its largest weight is the largest number of the format.

up to 32 rows   activations stay as they are: a product unpacks weights on its way to the tensor cores (gemv.py, skinny_gemm.py)
more            activations are rounded to 8 bits too, with a scale for each row (`quantise_rows`), and the tensor cores
                multiply 8 bits with 8 bits: twice the rate of bfloat16, and half the bytes
deterministic   `unpack` writes the matrix out, for the product with a fixed order
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

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
def _quantise_rows(x, packed, scales, WIDTH: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / LARGEST
    tl.store(packed + row * WIDTH + at, (values / scale).to(packed.dtype.element_ty), mask=at < WIDTH)
    tl.store(scales + row, scale)


def quantise_rows(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """x: [rows, width] -> packed, the same in fp8, and scales float32 [rows]. A number that is none stays one."""
    rows, width = x.shape
    _quantise_rows[(rows,)](
        *(x, packed, scales), WIDTH=width, LARGEST=LARGEST, BLOCK=next_power_of_2(width), num_warps=4 if width <= 2048 else 8
    )


class Rows8Bits:
    """Rows in 8 bits, on their way into a product."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        """Up to so many rows, up to so wide."""
        self._packed = torch.empty(rows * width, dtype=FP8, device=device)
        self._scales = torch.empty(rows, dtype=torch.float32, device=device)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """x @ weight.t() + bias -> out, in bfloat16."""
        packed, of_rows = self._packed[: x.numel()].view(x.shape), self._scales[: len(x)]
        quantise_rows(x, packed, of_rows)
        torch._scaled_mm(
            *(packed, weight.t(), of_rows[:, None], scales[None, :], bias),
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )


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
