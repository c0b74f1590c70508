"""How much memory is left for the KV pool: the largest step is run on a throw-away pool, and memory is measured around it.

    total |-- share that may be used: gpu_memory_utilization ---------------------------------------------|            |
          |-- in use by everybody: weights, the step's lasting buffers, graphs --|-- step --|-- KV pool --|-- reserved --|

`step`: what a step needs on top while it runs. `reserved`: what other processes take after the pool is there. Buffers are those
of the context that will be served, and everything that is recorded for later steps is there when memory is measured. Steps
with contexts longer than CONTEXT_TOKENS_MAX are not tried: the throw-away pool would need the memory that is to be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.kvpool.layout import KVLayout
from baton.kvpool.memory import GIB
from baton.kvpool.pool import pool_bytes
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.request import SamplingParams
from baton.protocol.step import BatchRows, NewSequence, StepPlan
from baton.worker.executors.base import PoolBinder
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform

CONTEXT_TOKENS_MAX: Final = 4096
LARGEST = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
"""The settings that need most: logits of every row, adjusted, sorted, and kept for log-probabilities."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    total_bytes: int
    used_bytes: int
    "By everybody, with weights loaded, and without a KV pool."
    step_bytes: int
    "What the largest step needs on top of that, while it runs."

    def pool_bytes(self, share: float) -> int:
        return int(self.total_bytes * share) - self.used_bytes - self.step_bytes


def measure(platform: Platform, with_pool: PoolBinder, layout: KVLayout, config: WorkerConfig, context: int) -> MemoryProfile:
    context = min(context, platform.memory().total_bytes // layout.block_bytes * layout.block_size)  # no pool holds more
    plan = largest_step(config, min(context, CONTEXT_TOKENS_MAX))
    pool = platform.create_pool(layout, sum(len(new.blocks) for new in plan.new))
    runner = ModelRunner(with_pool(pool, context), pool, slots=config.slots)
    runner.executor.prepare()
    step = platform.memory_of_step(lambda: runner.execute(plan))
    facts = platform.memory()
    used = facts.total_bytes - facts.free_bytes - pool_bytes(layout, pool.blocks)
    del pool
    runner.close()
    return MemoryProfile(facts.total_bytes, max(used, 0), step)


def largest_step(config: WorkerConfig, context: int) -> StepPlan:
    """As many sequences and tokens as a step may have: chunks as long as contexts allow, the first at the end of its own."""
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


def blocks_that_fit(profile: MemoryProfile, layout: KVLayout, config: WorkerConfig, share: float) -> int:
    """At least one; else an error with the numbers, and what can be done."""
    room = profile.pool_bytes(share) - int(config.memory_reserved_gib * GIB)
    blocks = room // layout.block_bytes
    if blocks >= 1:
        return blocks
    total, used, step = (count / GIB for count in (profile.total_bytes, profile.used_bytes, profile.step_bytes))
    host = f", {config.memory_reserved_gib:g} GiB go to the cache service" if config.memory_reserved_gib else ""
    raise InvalidConfig(
        f"no KV block fits: gpu_memory_utilization {share:g} of {total:.2f} GiB is {share * total:.2f} GiB; {used:.2f} GiB are "
        f"in use with the weights loaded, a step of {config.tokens_per_step} tokens and {config.slots} sequences needs "
        f"{step:.2f} GiB more{host}, and a block {layout.block_bytes / GIB:.4f} GiB: raise gpu_memory_utilization, lower "
        "max_num_batched_tokens or max_num_seqs, or give the number of blocks with kv_blocks (--kv-blocks)"
    )
