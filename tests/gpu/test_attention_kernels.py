"""Paged attention against plain torch; memory that holds no token is poisoned, and tables name no block there."""

import numpy as np
import plain
import pytest
import torch
from gpu_cases import PagedBatch, Shape

SHAPES = {
    "gqa": Shape(heads=8, kv_heads=2, dim=32),
    "mha": Shape(heads=2, kv_heads=2, dim=64, block_size=32),
    "seven": Shape(heads=7, kv_heads=1, dim=16),
    "odd": Shape(heads=4, kv_heads=2, dim=48),
    "window": Shape(heads=4, kv_heads=2, dim=32, window=40),
    "wide": Shape(heads=6, kv_heads=2, dim=128),
}


def decode(batch, shape, tuning=None, split_tokens=64, order=None, layer=1):
    from baton.worker.cuda.kernels.attention_decode import DecodeScratch, attend_decode

    place = batch.place
    q = batch.store(layer)
    wanted = plain.attend(
        q, batch.pool, layer, batch.tables, batch.slots, batch.starts, batch.contexts_t, scale=shape.scale, window=shape.window
    )
    # As in a step: the queries are the beginning of a longer row.
    rows = torch.cat((q.flatten(1), place.poisoned(len(q), 16)), 1)
    out = place.poisoned(*wanted.shape)
    order = place.ints(np.arange(len(q)) if order is None else order)
    scratch = DecodeScratch(len(q), shape.heads, shape.kv_heads, shape.dim, place.device, None if tuning is None else [tuning])
    scratch.values.fill_(float("nan")), scratch.sums.fill_(float("nan"))
    attend_decode(
        rows, batch.pool, layer, batch.tables, batch.slots, batch.positions, order, place.ints([split_tokens]), scratch, out,
        heads=shape.heads, scale=shape.scale, window=shape.window, tuning=tuning,
    )  # fmt: skip
    assert not scratch.arrived.any(), "counters are left as they were found"
    return out, wanted


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode(place, shape):
    batch = PagedBatch(place, shape, contexts=[0, 14, 15, 16, 63, 64, 129], counts=[1] * 7)
    out, wanted = decode(batch, shape)
    place.check(out, wanted)


@pytest.mark.parametrize("split_tokens", [64, 128, 1024])
def test_decode_of_few_long_sequences_in_any_splits(place, split_tokens):
    shape = SHAPES["gqa"]
    batch = PagedBatch(place, shape, contexts=[700, 255], counts=[1, 1])
    out, wanted = decode(batch, shape, split_tokens=split_tokens)
    place.check(out, wanted)


def test_decode_never_needs_more_splits_than_there_are(place):
    from baton.worker.cuda.kernels.attention_decode import DecodeTuning

    shape = SHAPES["gqa"]
    batch = PagedBatch(place, shape, contexts=[600, 20], counts=[1, 1])
    out, wanted = decode(batch, shape, tuning=DecodeTuning(64, 2, 3, 3), split_tokens=64)
    place.check(out, wanted)


def test_decode_of_some_rows_leaves_the_others_alone(place):
    shape = SHAPES["gqa"]
    batch = PagedBatch(place, shape, contexts=[30, 200, 70, 100], counts=[1] * 4)
    out, wanted = decode(batch, shape, order=[3, 1])
    place.check(out[[1, 3]], wanted[[1, 3]])
    assert out[[0, 2]].isnan().all()


def test_decode_with_fixed_splits_gives_the_same_bits_in_any_company(place):
    from baton.worker.cuda.kernels.attention_decode import FIXED_SPLIT_TOKENS, FIXED_TUNING

    shape = SHAPES["gqa"]
    crowd = PagedBatch(place, shape, contexts=[300, 17, 520, 64, 299], counts=[1] * 5)
    together, _ = decode(crowd, shape, tuning=FIXED_TUNING, split_tokens=FIXED_SPLIT_TOKENS, order=[2, 0, 4, 3, 1])
    for row in range(5):
        alone = PagedBatch(place, shape, contexts=[0], counts=[1])
        alone.pool, alone.tables = crowd.pool, crowd.tables
        alone.qkv, alone.slots = crowd.qkv[row : row + 1], crowd.slots[row : row + 1]
        alone.row_slots, alone.positions = alone.slots, crowd.positions[row : row + 1]
        alone.positions_np, alone.contexts_t = crowd.positions_np[row : row + 1], crowd.contexts_t[row : row + 1]
        out, _ = decode(alone, shape, tuning=FIXED_TUNING, split_tokens=FIXED_SPLIT_TOKENS)
        assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefill(place, shape):
    from baton.worker.cuda.kernels.attention_prefill import attend_prefill, prefill_tiles, rows_per_tile

    batch = PagedBatch(place, shape, contexts=[0, 37, 64, 5], counts=[70, 33, 1, 130])
    q = batch.store(0)
    wanted = plain.attend(
        q, batch.pool, 0, batch.tables, batch.slots, batch.starts, batch.contexts_t, scale=shape.scale, window=shape.window
    )
    out = place.poisoned(*wanted.shape)
    rows = rows_per_tile(shape.heads, shape.kv_heads, q.dtype)
    tiles = place.ints(prefill_tiles(np.arange(4), batch.counts, batch.contexts, rows))
    attend_prefill(
        q.flatten(1), batch.pool, 0, batch.tables, batch.slots, batch.starts, batch.contexts_t, tiles, out,
        heads=shape.heads, scale=shape.scale, window=shape.window,
    )  # fmt: skip
    place.check(out, wanted)


def test_tiles_are_small_in_float32():
    """With 128 rows a compiler took most of a minute, and the memory of threads 13 GiB of a GPU."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    from baton.worker.cuda.kernels.attention_prefill import rows_per_tile

    assert rows_per_tile(32, 8, torch.float32) == 32 // 4
    assert rows_per_tile(32, 4, torch.bfloat16) == 128 // 8
    assert rows_per_tile(64, 1, torch.float32) == 1, "the group alone fills a tile"


def test_tiles_of_a_mixed_batch():
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    from baton.worker.cuda.kernels.attention_prefill import prefill_tiles

    tiles = prefill_tiles(np.array([1, 4]), np.array([5, 2]), np.array([0, 100]), 2)
    assert tiles.tolist() == [[4, 0], [1, 4], [1, 2], [1, 0]], "those with the most work first"


def test_a_split_has_an_equal_share_of_the_work():
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    from baton.worker.cuda.kernels.attention_decode import split_tokens_for

    assert split_tokens_for(1024, rows=1, kv_heads=8) == 64
    assert split_tokens_for(8 * 1024, rows=8, kv_heads=8) == 256
    assert split_tokens_for(8 * 1025, rows=8, kv_heads=8) == 288, "four splits, not four and a rest"
    assert split_tokens_for(32 * 1025, rows=32, kv_heads=8) >= 1025, "equal sequences that fill the chip are not cut"
    assert split_tokens_for(0, rows=4, kv_heads=8) == 64
