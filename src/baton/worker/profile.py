"""Measures the memory left for the KV pool: the largest step runs on a temporary pool.

    total |-- share that may be used: gpu_memory_utilization -------------------------------------------------|            |
          |-- in use by all processes: weights, the step's lasting buffers, graphs --|-- step --|-- KV pool --|-- reserved --|

`step`: temporary memory of a step. `reserved`: memory that other processes allocate after the pool. With a draft model all of
it includes that model's part, and its KV pool with as many blocks. Buffers have the size of the served context, and all graphs
are recorded before memory is measured. Steps with contexts longer than CONTEXT_TOKENS_MAX are not run: the temporary pool would
need the memory that is being measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.config import DRAFTS_MAX, WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.kvpool.pool import pool_bytes
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.request import SamplingParams
from baton.protocol.step import BatchRows, NewSequence, StepPlan
from baton.worker.draft_model import MainModel
from baton.worker.drafters.model import ModelDrafter
from baton.worker.executors.base import PoolBinder
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform

CONTEXT_TOKENS_MAX: Final = 4096
LARGEST = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
"""The most expensive settings in memory: logits of every row are adjusted, sorted, and stored for log-probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    total_bytes: int
    used_bytes: int
    "Memory in use by all processes, with loaded weights, without a KV pool."
    step_bytes: int
    "Temporary memory of the largest step."

    def pool_bytes(self, share: float) -> int:
        return int(self.total_bytes * share) - self.used_bytes - self.step_bytes


WithDrafter = Callable[[MainModel], ModelDrafter]
"""Builds the drafter of a draft model with loaded weights, with a pool of its own."""


def measure(
    platform: Platform,
    with_pool: PoolBinder,
    layout: KVLayout,
    config: WorkerConfig,
    context: int,
    with_drafter: WithDrafter | None = None,
) -> MemoryProfile:
    # no pool holds more than this
    context = min(context, platform.memory().total_bytes // layout.block_bytes * layout.block_size)
    plan = largest_step(config, min(context, CONTEXT_TOKENS_MAX))
    pool = platform.create_pool(layout, sum(len(new.blocks) for new in plan.new))
    executor = with_pool(pool, context)
    drafter = None if with_drafter is None else with_drafter(MainModel(pool.blocks, context, executor.config.vocab_size))
    runner = ModelRunner(executor, pool, slots=config.slots, draft_model=drafter)
    runner.prepare()
    step = platform.memory_of_step(lambda: _run_largest(runner, plan, drafter))
    facts = platform.memory()
    pools = pool_bytes(layout, pool.blocks) + (0 if drafter is None else drafter.pool_bytes)
    used = facts.total_bytes - facts.free_bytes - pools
    del pool
    runner.close()
    return MemoryProfile(facts.total_bytes, max(used, 0), step)


def _run_largest(runner: ModelRunner, plan: StepPlan, drafter: ModelDrafter | None) -> None:
    """Runs the step, and then the largest passes of the draft model: they never run at the same time."""
    runner.execute(plan)
    if drafter is not None:
        batch, slots = runner.batch, [int(new.slot) for new in plan.new]
        rooms = (batch.rooms[slots] + 1 - batch.lengths[slots]).tolist()  # the last draft is not computed
        drafter.propose_all({slot: min(DRAFTS_MAX, room) for slot, room in zip(slots, rooms, strict=True)}, batch)


def largest_step(config: WorkerConfig, context: int) -> StepPlan:
    """A step with the maximum of sequences and tokens: chunks as long as contexts allow, the first at the end of its
    context."""
    sequences = min(config.slots, config.tokens_per_step)
    left, block = config.tokens_per_step - sequences, 0
    news, counts = [], []
    for slot in range(sequences):
        chunk = 1 + min(left, max(context - 2, 0))
        left -= chunk - 1
        tokens = max(context - 1, 1) if slot == 0 else chunk
        blocks = tuple(range(block, block + tokens // config.block_size + 1))
        block += len(blocks)
        news.append(_sequence(slot, tokens, tokens - chunk, blocks))
        counts.append(chunk)
    run = BatchRows(tuple(new.slot for new in news), tuple(counts))
    return StepPlan(StepNo(1), WorkerEpoch(0), new=tuple(news), run=run, sampling=(LARGEST,))


def _sequence(slot: int, tokens: int, computed: int, blocks: tuple[int, ...]) -> NewSequence:
    numbers = tuple(map(BlockId, blocks))
    return NewSequence(Slot(slot), Incarnation(1), (0,) * tokens, tokens, computed, numbers, 0, 0)


def blocks_that_fit(profile: MemoryProfile, layout: KVLayout, config: WorkerConfig, share: float, *, beside: int = 0) -> int:
    """The number of blocks that fit. `beside`: bytes that each has in another pool. Raises InvalidConfig, with numbers and
    advice, if none fits."""
    room = profile.pool_bytes(share) - int(config.memory_reserved_gib * GIB)
    block = layout.block_bytes + beside
    blocks = room // block
    if blocks >= 1:
        return blocks
    total, used, step = (count / GIB for count in (profile.total_bytes, profile.used_bytes, profile.step_bytes))
    host = f", {config.memory_reserved_gib:g} GiB go to the cache service" if config.memory_reserved_gib else ""
    raise InvalidConfig(
        f"no KV block fits: gpu_memory_utilization {share:g} of {total:.2f} GiB is {share * total:.2f} GiB; {used:.2f} GiB are "
        f"in use with the weights loaded, a step of {config.tokens_per_step} tokens and {config.slots} sequences needs "
        f"{step:.2f} GiB more{host}, and a block {block / GIB:.4f} GiB: raise gpu_memory_utilization, lower "
        "max_num_batched_tokens or max_num_seqs, or give the number of blocks with kv_blocks (--kv-blocks)"
    )
