"""Norms of queries and keys over all heads of a token as one row (OLMo): before rope_store.py, which then has none.

In place, in the qkv product: one program for the queries of a row, another for its keys.
"""

import torch
import triton
import triton.language as tl

from baton.worker.cuda.kernels.add_norm import normed_row
from baton.worker.cuda.kernels.sizes import next_power_of_2


@triton.jit
def _norm_head_rows(qkv, q_norm, k_norm, stride, eps, Q: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    here = qkv + tl.program_id(0).to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        x = tl.load(here + at, mask=at < Q, other=0.0).to(tl.float32)
        x = normed_row(x, q_norm, q_norm, eps, at, at < Q, Q, False, False)
        tl.store(here + at, x.to(qkv.dtype.element_ty), mask=at < Q)
    else:
        x = tl.load(here + Q + at, mask=at < K, other=0.0).to(tl.float32)
        x = normed_row(x, k_norm, k_norm, eps, at, at < K, K, False, False)
        tl.store(here + Q + at, x.to(qkv.dtype.element_ty), mask=at < K)


def norm_head_rows(qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor], eps: float) -> None:
    """Normalise queries and keys in place. qkv: [rows, queries and keys and values]; norms: weights of all queries, and of all
    keys."""
    queries, keys = (len(norm) for norm in norms)
    _norm_head_rows[(len(qkv), 2)](
        *(qkv, *norms, qkv.stride(0), eps), Q=queries, K=keys, BLOCK=next_power_of_2(max(queries, keys)), num_warps=4
    )
