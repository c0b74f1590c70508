"""Free memory, as the machine and its container say."""

from __future__ import annotations

import pytest

from baton.kvpool.memory import MemoryFacts, _group_memory, main_memory


def test_a_container_s_limit_counts_and_its_clean_cache_does_not(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\n")
    assert _group_memory(tmp_path) == MemoryFacts(total_bytes=1000, free_bytes=550)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_no_limit_is_no_answer(tmp_path, limit):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("700")
    assert _group_memory(tmp_path) is None
    assert _group_memory(tmp_path / "nothing") is None


def test_this_machine_has_some():
    facts = main_memory()
    assert 0 < facts.free_bytes <= facts.total_bytes
