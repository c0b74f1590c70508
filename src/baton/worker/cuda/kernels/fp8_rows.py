"""Products of many rows with weights in 8 bits: rows are rounded to 8 bits too, and the tensor cores multiply 8 bits with 8
bits, at twice the rate of bfloat16 and with half the bytes. A scale per row; if weights have block scales, per row and 128
inputs, as checkpoints with such blocks expect (`activation_scheme: dynamic`)."""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.fp8 import FP8, LARGEST, STORED_BLOCK, Scales
from baton.worker.cuda.kernels.sizes import cdiv, next_power_of_2

ROWS_ALIGNED = 4
"""Multiple of rows that cuBLAS needs with block scales. Outputs have room for it."""


@triton.jit
def _quantise_rows(
    x, packed, scales, stride,
    WIDTH: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = part[:, None] * PART + tl.arange(0, PART)[None, :]
    values = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-12) / LARGEST
    tl.store(packed + row * WIDTH + at, (values / scale[:, None]).to(packed.dtype.element_ty), mask=at < WIDTH)
    tl.store(scales + part * stride + row, scale, mask=part * PART < WIDTH)


def quantise_rows(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, part: int | None = None) -> None:
    """Quantise rows x: [rows, width] -> packed, in fp8, and scales float32 [parts, rows].

    NaN is kept. part: inputs that share a scale; None: all.
    """
    rows, width = x.shape
    part = part or next_power_of_2(width)
    _quantise_rows[(rows,)](
        *(x, packed, scales, scales.stride(0)),
        WIDTH=width,
        LARGEST=LARGEST,
        PARTS=next_power_of_2(cdiv(width, part)),
        PART=part,
        num_warps=4 if width <= 2048 else 8,
    )


class Rows8Bits:
    """Rows in 8 bits, as input of a product."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        """Memory for up to `rows` rows of up to `width` inputs."""
        rows = cdiv(rows, ROWS_ALIGNED) * ROWS_ALIGNED
        self._packed = torch.zeros(rows * width, dtype=FP8, device=device)
        self._scales = torch.zeros(cdiv(width, STORED_BLOCK) * rows, dtype=torch.float32, device=device)

    @staticmethod
    def takes(scales: Scales) -> bool:
        return scales.blocks is None or scales.library is not None

    def rounded(self, x: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
        """x in 8 bits, and its scales [parts, rows], matching the weights' scales. Valid until the next call."""
        rows, width = x.shape
        padded, part = (rows, None) if scales.blocks is None else (cdiv(rows, ROWS_ALIGNED) * ROWS_ALIGNED, STORED_BLOCK)
        packed = self._packed[: padded * width].view(padded, width)
        parts = cdiv(width, part or width)
        of_rows = self._scales[: parts * padded].view(parts, padded)
        quantise_rows(x, packed, of_rows, part)
        return packed, of_rows

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scales: Scales, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """x @ weight.t() + bias -> out, in bfloat16."""
        packed, of_rows = self.rounded(x, scales)
        of_weights = scales.outputs[None, :]
        if scales.library is not None:
            of_weights = scales.library.t()
            out = out.as_strided((len(packed), out.shape[1]), out.stride())
        torch._scaled_mm(
            *(packed, weight.t(), of_rows.t(), of_weights, bias),
            out_dtype=out.dtype,
            use_fast_accum=scales.library is None,
            out=out,
        )
