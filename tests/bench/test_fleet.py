"""bench/fleet.py on a few instances: its traffic, its oracle, digests that are found by both routers, and what it counts."""

from __future__ import annotations

from itertools import islice
from random import Random
from unittest.mock import patch

import pytest

import fleet
import fleet_size
import fleet_traffic
from baton.core.cluster import placement
from baton.core.kv.marks import marks_of


def run(mode, instances=3, requests=100, **more):
    with patch.object(placement, "marks_of", fleet.every_mark if mode == "oracle" else marks_of):
        made = fleet.Fleet(mode, instances, **more)
        return made, made.run(fleet_traffic.tenants(Random(2), instances * 2.0, number=8), requests)


@pytest.mark.parametrize("mode", fleet.MODES)
def test_every_request_is_placed_and_hits_are_those_of_real_caches(mode):
    made, counts = run(mode)
    assert counts.rejected == counts.warned == counts.cut == 0
    assert 0 < counts.found <= counts.could_be < counts.tokens
    assert (counts.digest_bytes > 0) == (mode in ("digests", "2 routers"))
    for instance in made.instances:
        instance.cache.check()
    for router in made.routers:
        router.check()


def test_the_oracle_knows_every_block_at_once():
    made, _ = run("oracle")
    index, names = made.routers[0].membership.index, made.routers[0].membership.names
    for instance in made.instances:
        known = index.confirmed(names[f"i{instance.number}"].number)
        assert sorted(known) == sorted(map(fleet.short_key, instance.cache.index()))


def test_two_routers_find_what_the_other_has_sent():
    _, digests = run("2 routers")
    _, guesses = run("guesses")
    assert digests.found >= guesses.found


def test_an_instance_with_more_keys_than_its_share_is_counted():
    _, counts = run("digests", keys_max=16)
    assert counts.cut > 0
    assert counts.warned > 0


def test_conversations_are_as_long_and_as_often_continued_as_in_the_trace():
    arrivals = list(islice(fleet_traffic.conversation(Random(1), 0.1), 400))
    assert [each.at for each in arrivals] == sorted(each.at for each in arrivals)
    assert 8_000 < sum(each.tokens for each in arrivals) / len(arrivals) < 14_000
    assert 300 < sum(each.output for each in arrivals) / len(arrivals) < 400
    assert 0.2 < sum(len(each.keys) > each.tokens // 16 + each.output // 16 + 2 for each in arrivals) / len(arrivals) < 0.6


def test_requests_of_a_trace_share_the_blocks_of_their_hash_ids(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": %d, "output_length": 20, "hash_ids": %s}\n'
    path.write_text(row % (0, 1000, [0, 1]) + row % (3000, 1500, [0, 1, 2]))
    first, second = fleet_traffic.trace(Random(1), 2.0, path)
    assert (first.tokens, second.tokens, second.at) == (1000, 1500, 1.0)
    assert first.keys[: 1000 // 16] == second.keys[: 1000 // 16]
    assert len(second.keys) == (1500 + 20) // 16


def test_the_memory_of_a_full_index_counts_all_its_entries():
    entries, mebibytes = fleet_size.memory(4, 400)
    assert entries == 400
    assert mebibytes > 0
