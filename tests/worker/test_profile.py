"""How many KV blocks fit is measured: the largest step on a throw-away pool, and memory around it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from rig import TINY, tiny_model

from baton.config import ServeConfig, TiersConfig, WorkerConfig
from baton.config.engine import STAGING_GIB
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB, MemoryFacts
from baton.kvpool.pool import pool_bytes
from baton.worker.build import agreed_blocks, fit_pool, pool_plan
from baton.worker.draft_model import MainModel
from baton.worker.drafters.model import ModelDrafter
from baton.worker.kv_layout import kv_layout
from baton.worker.platforms.cpu import CpuPlatform
from baton.worker.profile import MemoryProfile, blocks_that_fit, largest_step, measure

LLAMA_8B = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="int8", format="int8-fours")
PROFILE = MemoryProfile(16 * GIB, 9 * GIB, GIB // 2)


@pytest.mark.parametrize(("slots", "tokens", "context"), [(4, 64, 100), (4, 64, 10), (1, 1, 2), (8, 8, 500), (64, 512, 2048)])
def test_the_largest_step_has_as_many_sequences_and_tokens_as_there_may_be(slots: int, tokens: int, context: int):
    plan = largest_step(WorkerConfig(slots=slots, tokens_per_step=tokens, block_size=4), context)
    assert len(plan.new) == slots
    assert plan.tokens == min(tokens, slots * max(context - 1, 1))
    assert max(len(new.tokens) for new in plan.new) == max(context - 1, 1)
    blocks = [block for new in plan.new for block in new.blocks]
    assert sorted(blocks) == list(range(len(blocks))), "each has blocks of its own"


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_it_runs_on_a_throw_away_pool_and_gives_everything_back(compute: str):
    model = tiny_model(compute=compute)
    layout = kv_layout(TINY, 4, model.loaded.kv)
    config = WorkerConfig(slots=4, tokens_per_step=64, block_size=4)
    gc.collect()  # what earlier tests left open
    descriptors = len(os.listdir("/proc/self/fd"))
    profile = measure(CpuPlatform(), model.loaded.with_pool, layout, config, 100)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert 0 < profile.used_bytes < profile.total_bytes
    assert 0 <= profile.step_bytes < GIB


def test_what_is_in_use_does_not_count_the_throw_away_pool():
    """Memory as the platform says it: 10 GiB, 4 of them free beside weights and the pool that is thrown away."""

    class Measured(CpuPlatform):
        def memory(self) -> MemoryFacts:
            return MemoryFacts(10 * GIB, 4 * GIB)

        def memory_of_step(self, run) -> int:
            run()
            return 12345

    model = tiny_model()
    layout = kv_layout(TINY, 4, model.loaded.kv)
    config = WorkerConfig(slots=2, tokens_per_step=16, block_size=4)
    profile = measure(Measured(), model.loaded.with_pool, layout, config, 40)
    blocks = sum(len(new.blocks) for new in largest_step(config, 40).new)
    assert profile == MemoryProfile(10 * GIB, 6 * GIB - pool_bytes(layout, blocks), 12345)


def test_what_is_recorded_and_the_buffers_of_the_real_context_are_measured():
    """Found by a review: on a GPU both came after the pool was sized, and utilisation above 0.93 could fail."""
    model, events = tiny_model(), []
    layout = kv_layout(TINY, 4, model.loaded.kv)

    class Measured(CpuPlatform):
        def memory(self) -> MemoryFacts:
            events.append("memory")
            return MemoryFacts(10 * GIB, 4 * GIB)

        def memory_of_step(self, run) -> int:
            events.append("step")
            run()
            return 1

    def with_pool(pool, context_tokens=None):
        executor = model.loaded.with_pool(pool, context_tokens)
        events.append(f"context {context_tokens}")
        executor.prepare = lambda: events.append("prepare")
        return executor

    config = WorkerConfig(slots=2, tokens_per_step=16, block_size=4)
    measure(Measured(), with_pool, layout, config, 100_000)
    assert events == ["memory", "context 100000", "prepare", "step", "memory"]
    events.clear()
    measure(Measured(), with_pool, layout, config, 2**60)
    assert events[1] == f"context {10 * GIB // layout.block_bytes * 4}", "no pool could hold more"


def test_a_draft_model_is_measured_with_the_model():
    """Its pool is thrown away too, it is prepared before memory is measured, and its largest passes are part of the step."""
    model, events = tiny_model(), list[object]()
    layout = kv_layout(TINY, 4, model.loaded.kv)

    class Measured(CpuPlatform):
        def memory(self) -> MemoryFacts:
            events.append("memory")
            return MemoryFacts(10 * GIB, 4 * GIB)

        def memory_of_step(self, run) -> int:
            events.append("step")
            run()
            return 1

    pools = []

    def with_drafter(main: MainModel) -> ModelDrafter:
        pools.append(CpuPlatform().create_pool(layout, main.blocks))
        passes = model.loaded.drafting(pools[0], main.context_tokens)
        passes.prepare = lambda: events.append("prepare")
        run = passes.run

        def recorded(flat, *others):
            events.append(len(flat.token_ids))
            return run(flat, *others)

        passes.run = recorded
        return ModelDrafter(passes, pools[0], slots=2, vocabulary=main.vocabulary)

    def with_pool(pool, context_tokens=None):
        executor = model.loaded.with_pool(pool, context_tokens)
        executor.prepare = lambda: events.append("prepare")
        return executor

    config = WorkerConfig(slots=2, tokens_per_step=16, block_size=4)
    profile = measure(Measured(), with_pool, layout, config, 40, with_drafter)
    plan = largest_step(config, 40)
    rows = sum(len(new.tokens) + 1 for new in plan.new)
    assert events == ["memory", "prepare", "prepare", "step", rows, "memory"]
    assert profile.used_bytes == 6 * GIB - 2 * pool_bytes(layout, pools[0].blocks)
    assert pools[0].blocks == sum(len(new.blocks) for new in plan.new)


def test_a_peak_is_seen_although_it_is_over():
    """In a process of its own, and without malloc, which may keep what it was given back."""
    script = """
from mmap import mmap
from baton.kvpool.memory import transient_bytes
def touch():
    with mmap(-1, 2**27) as pages:
        for page in range(0, 2**27, 4096):
            pages[page] = 1
print(transient_bytes(lambda: None) < 2**24, transient_bytes(touch) > 2**26)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["True", "True"]


def test_the_pool_gets_what_the_share_leaves():
    assert PROFILE.pool_bytes(0.75) == 12 * GIB - 9 * GIB - GIB // 2
    config = WorkerConfig(memory_utilization=0.75)
    fit = blocks_that_fit(PROFILE, LLAMA_8B, config, 0.75)
    assert fit == 5 * GIB // 2 // LLAMA_8B.block_bytes
    size = fit_pool(config, LLAMA_8B, 131_072, fit)
    assert (size.blocks, size.context_tokens) == (fit, fit * 16)
    assert fit_pool(config, LLAMA_8B, 131_072).context_tokens == 131_072, "before it is measured nothing is lowered"


def test_the_host_tier_is_inside_the_share():
    """Its memory is taken after the KV pool's, by another process."""
    worker = ServeConfig(gpu_memory_utilization=0.75, kv_host_gib=1.0).engine().worker
    assert blocks_that_fit(PROFILE, LLAMA_8B, worker, 0.75) == 3 * GIB // 2 // LLAMA_8B.block_bytes
    with pytest.raises(InvalidConfig, match="3 GiB go to the cache service"):
        blocks_that_fit(PROFILE, LLAMA_8B, WorkerConfig(memory_reserved_gib=3.0), 0.75)


def test_so_is_what_blocks_pass_through_on_their_way_to_storage():
    tiers = ServeConfig(kv_storage="file:/somewhere").engine().tiers
    worker = ServeConfig(gpu_memory_utilization=0.75, kv_storage="file:/somewhere").engine().worker
    assert worker.memory_reserved_gib == STAGING_GIB > 0
    assert tiers.host_blocks(2**20) == int(STAGING_GIB * 1024)
    assert (TiersConfig().memory_gib, TiersConfig().host_blocks(2**20)) == (0.0, 0)


def test_no_more_than_all_slots_could_fill():
    assert fit_pool(WorkerConfig(memory_utilization=0.9, slots=2), LLAMA_8B, 4096, 10_000).blocks == 2 * 256


def test_zero_blocks_is_an_error_that_names_the_knobs():
    with pytest.raises(
        InvalidConfig, match=r"no KV block fits: gpu_memory_utilization 0\.5 of 16\.00 GiB is 8\.00 GiB; 9\.00"
    ) as error:
        blocks_that_fit(PROFILE, LLAMA_8B, WorkerConfig(), 0.5)
    advice = str(error.value).rpartition(": ")[2]
    for knob in ("raise gpu_memory_utilization", "lower max_num_batched_tokens or max_num_seqs", "--kv-blocks"):
        assert knob in advice


def test_a_context_that_was_asked_for_and_does_not_fit_names_the_share():
    config = WorkerConfig(memory_utilization=0.5, context_tokens_max=1000)
    with pytest.raises(
        InvalidConfig, match=r"gpu_memory_utilization is 0\.5: that leaves 10 KV blocks, .*raise gpu_memory_utilization"
    ):
        fit_pool(config, LLAMA_8B, 4096, 10)


def test_the_rank_with_the_least_room_decides():
    class Other:
        def least(self, number: int) -> int:
            return min(number, 7)

    config = WorkerConfig(memory_utilization=0.9)
    alone = agreed_blocks(PROFILE, LLAMA_8B, config, 0.9, None)
    assert alone == blocks_that_fit(PROFILE, LLAMA_8B, config, 0.9) > 7
    assert agreed_blocks(PROFILE, LLAMA_8B, config, 0.9, Other()) == 7  # type: ignore[arg-type]


def test_given_blocks_win_and_the_plan_says_who_decided():
    class Pool:
        blocks, layout = 7, LLAMA_8B

    for settings, knob in (
        ({"blocks": 7, "memory_utilization": 0.5}, "kv_blocks"),
        ({"memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({}, "kv_memory_gib"),
    ):
        assert pool_plan(WorkerConfig(**settings), Pool(), None)["kv_blocks_by"] == knob
    plan = pool_plan(WorkerConfig(memory_utilization=0.5), Pool(), PROFILE)
    assert (plan["memory_gib"], plan["memory_used_gib"], plan["memory_step_gib"]) == (16.0, 9.0, 0.5)
    of_two = pool_plan(WorkerConfig(ranks=2, memory_utilization=0.5), Pool(), PROFILE)
    assert of_two["kv_block_bytes"] == 2 * plan["kv_block_bytes"], "of all ranks"
    assert of_two["kv_pool_gib"] == pytest.approx(2 * plan["kv_pool_gib"], abs=0.001)


def test_a_worker_is_told_the_largest_step():
    worker = ServeConfig(max_num_seqs=700, gpu_memory_utilization=0.5).engine().worker
    assert (worker.tokens_per_step, worker.memory_utilization) == (700, 0.5)
    assert replace(worker, memory_utilization=None).memory_utilization is None
