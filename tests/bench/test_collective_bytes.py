"""The table of exchanged bytes: its formula on a model that can be counted by hand, and its place in the docs."""

from __future__ import annotations

from pathlib import Path

from baton.models.shapes import SHAPES
from collective_bytes import exchanged, table, weight_bytes

DOCS = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


def test_a_step_counted_by_hand():
    config = SHAPES["llama-3.1-8b"]  # 32 layers, 4,096 wide, 128,256 tokens
    found = exchanged(config, 4, rows=10, sampled=3)
    row = 4096 * 2
    assert found.calls == 65
    assert found.gathered_sums == 64 * 10 * 3 * row  # three other ranks
    assert found.sums == 64 * 10 * row * 6 // 4  # a ring: 2 (R - 1) / R of the rows
    assert found.logits == 3 * 4 * 128_256 * 3 // 4


def test_two_ranks_move_as_much_in_order_as_in_a_ring():
    found = exchanged(SHAPES["qwen3-235b-a22b"], 2, 7, 1)
    assert found.sums == found.gathered_sums


def test_parts_are_smaller_by_all_but_the_embedding():
    config = SHAPES["llama-3.1-8b"]
    whole, half = weight_bytes(config, 1), weight_bytes(config, 2)
    replicated = 2 * (128_256 * 4096 + 65 * 4096)
    assert half == (whole - replicated) // 2 + replicated


def test_the_docs_have_this_table():
    assert table() in DOCS.read_text()
