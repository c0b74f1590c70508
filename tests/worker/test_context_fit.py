"""A context larger than the pool is lowered to what fits; one that was asked for is refused, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config import ServeConfig, WorkerConfig, lowered_context
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.worker.build import fit_pool

LLAMA_8B = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="int8", format="int8-fours")
MODEL_CONTEXT = 131_072


def test_a_large_model_starts_with_the_default_memory():
    """131,072 tokens need 8.25 GiB of KV cache; the default is 2."""
    size = fit_pool(WorkerConfig(), LLAMA_8B, MODEL_CONTEXT)
    assert size.context_tokens == size.blocks * 16
    assert 30_000 < size.context_tokens < MODEL_CONTEXT
    assert size.blocks * LLAMA_8B.block_bytes <= 2 * GIB


def test_a_pool_that_holds_more_changes_nothing():
    size = fit_pool(WorkerConfig(slots=3), LLAMA_8B, 4096)
    assert (size.blocks, size.context_tokens) == (3 * 256, 4096)
    assert fit_pool(WorkerConfig(blocks=9999), LLAMA_8B, 4096).context_tokens == 4096
    assert fit_pool(WorkerConfig(blocks=9999, context_tokens_max=100), LLAMA_8B, 4096).context_tokens == 100


def test_ranks_divide_the_memory_of_the_pool():
    """Each has a part of every block: `layout` is of one rank."""
    alone, of_four = (fit_pool(WorkerConfig(ranks=ranks), LLAMA_8B, MODEL_CONTEXT).blocks for ranks in (1, 4))
    assert of_four == alone // 4


@pytest.mark.parametrize("blocks", [1, 7, 255])
def test_given_blocks_are_kept_and_the_context_is_what_they_hold(blocks: int):
    size = fit_pool(WorkerConfig(blocks=blocks), LLAMA_8B, 4096)
    assert (size.blocks, size.context_tokens) == (blocks, blocks * 16)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"blocks": 10, "context_tokens_max": 161},
            "kv_blocks is 10, .* needs 11 blocks .*raise kv_blocks, or lower .* to 160",
        ),
        ({"context_tokens_max": 100_000}, "kv_memory_gib is 2: .* needs 6250 blocks .*raise kv_memory_gib, or lower"),
        (
            {"kv_memory_gib": 0.0001},
            "that is 0 KV blocks, and a context of 2 tokens needs 1 blocks of 16 tokens .*raise kv_mem",
        ),
        ({"blocks": 1, "block_size": 1}, "kv_blocks is 1, and a context of 2 tokens needs 2 blocks of 1 tokens"),
        ({"context_tokens_max": MODEL_CONTEXT + 1}, "the model was made for 131072: lower it"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(settings, why: str):
    with pytest.raises(InvalidConfig, match=why):
        fit_pool(WorkerConfig(**settings), LLAMA_8B, MODEL_CONTEXT)


def test_ranks_divide_the_memory_for_the_kv_cache():
    """Each rank took all of it, and each has a part of every block."""
    part = replace(LLAMA_8B, kv_heads=4)
    assert fit_pool(WorkerConfig(ranks=2), part, MODEL_CONTEXT) == fit_pool(WorkerConfig(), LLAMA_8B, MODEL_CONTEXT)


def test_what_is_said_names_an_option_that_is_enough():
    lowered = fit_pool(WorkerConfig(), LLAMA_8B, MODEL_CONTEXT)
    words = lowered_context(ServeConfig(), lowered.context_tokens, MODEL_CONTEXT)
    assert words is not None
    enough = float(words.split("--kv-memory-gib ")[1].split(",")[0])
    assert fit_pool(WorkerConfig(kv_memory_gib=enough), LLAMA_8B, MODEL_CONTEXT).context_tokens == MODEL_CONTEXT
    assert "--kv-memory-gib 6.65," in str(lowered_context(ServeConfig(), 301, 1000)), "6.64 would not quite do"
    assert "--kv-blocks 256" in str(lowered_context(ServeConfig(kv_blocks=8), 128, 4096))
    assert lowered_context(ServeConfig(max_model_len=100), 100, 4096) is None
    assert lowered_context(ServeConfig(), 4096, 4096) is None
