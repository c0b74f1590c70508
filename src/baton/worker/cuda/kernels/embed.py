"""The first hidden states of a step: each row's token looked up in the embedding table.

token_ids   | 17 | -1 | -1 | 4 | ...      a row's token, or FEEDBACK: the token that its slot sampled in the previous step
slots       |  2 |  0 |  5 | 9 | ...      last_tokens[slots[row]] is that token, and it never leaves the device
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.sizes import next_power_of_2

FEEDBACK = -1


@triton.jit
def _embed(token_ids, slots, last_tokens, table, hidden, scale, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(token_ids + row)
    slot = tl.load(slots + row)
    fed_back = tl.load(last_tokens + tl.maximum(slot, 0))
    token = tl.where(token < 0, fed_back, token)
    # A failed row and a padding row have no token: their results are never used.
    token = tl.maximum(token, 0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(table + token * WIDTH + at, mask=at < WIDTH, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(hidden.dtype.element_ty)
    tl.store(hidden + row.to(tl.int64) * WIDTH + at, x, mask=at < WIDTH)


def embed(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Look up the tokens of a step. token_ids, slots: int32 [rows]; last_tokens: int32 [slots]; table: [vocabulary, width] ->
    hidden [rows, width], times `scale`."""
    width = table.shape[1]
    _embed[(len(token_ids),)](
        *(token_ids, slots, last_tokens, table, hidden, scale),
        WIDTH=width,
        SCALED=scale != 1.0,
        BLOCK=next_power_of_2(width),
        num_warps=4,
    )
