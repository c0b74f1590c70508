"""The stats of an instance as one message, and the heartbeat by which routers place requests."""

from __future__ import annotations

from typing import Final

from baton.core.engine.stats import Stats
from baton.core.engine.worker_watch import WorkerState
from baton.core.instance import Instance
from baton.core.kv.tiers import Tiers
from baton.protocol.control import InstanceStats
from baton.protocol.instance import HELD_CLASSES_MAX, PREEMPTED_NAMED_MAX, Heartbeat

HANDOFF_COUNTERS: Final = ("handed_over", "not_kept", "adopted", "not_adopted")
MOVED: Final = ("stored", "loaded", "put", "fetched", "pulled")
"""Counters of blocks that are reported in bytes too."""


def snapshot(instance: Instance, storage: dict[str, int] | None = None, block_bytes: int = 0) -> InstanceStats:
    """Read the instance's counters into one message. `storage`: counters of the storage backend. `block_bytes`: size of a
    block, to report blocks in bytes too."""
    board, stats, pool = instance.board, instance.stats, instance.board.cache.pool
    tiers = board.tiers
    return InstanceStats(
        running=len(board.running),
        waiting=len(board.waiting) - board.waiting.returned,
        preempted=len(board.preempting) + board.waiting.returned,
        blocks_total=pool.total,
        blocks_free=pool.free,
        blocks_cached=pool.idle,
        blocks_held=pool.total - pool.free - pool.idle,
        slots_taken=board.slots.taken,
        requests_open=len(board.groups),
        steps_in_flight=len(instance.in_flight),
        loading=board.loading,
        host_blocks=tiers.host.total,
        host_blocks_cached=len(tiers.host),
        cache_service=tiers.up,
        storage_circuit=tiers.read_circuit.state if tiers.config.storage else "",
        storage_write_circuit=tiers.write_circuit.state if tiers.config.storage else "",
        handoffs={name: getattr(stats, name) for name in HANDOFF_COUNTERS},
        tiers=_tier_counters(tiers, block_bytes) if tiers.enabled else {},
        storage=storage or {},
        steps=stats.steps,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        output_tokens=stats.output_tokens,
        drafts=_draft_counters(stats) if instance.board.drafts_ahead else {},
        preemptions=stats.preemptions,
        folded_blocks=stats.folded_blocks,
        evicted_blocks=board.cache.evicted,
        stale_rows=stats.stale_rows,
        stale_results=stats.stale_results,
        worker_losses=stats.worker_losses,
        crash_ends=stats.crash_ends,
        ended={reason.value: count for reason, count in stats.ended.items()},
        refused={str(reason): count for reason, count in stats.refused.items()},
        held_back={str(reason): count for reason, count in stats.held_back.items()},
        mode=mode_of(instance),
    )


def _tier_counters(tiers: Tiers, block_bytes: int) -> dict[str, int]:
    counters = {name: getattr(tiers.stats, name) for name in tiers.stats.__slots__}
    counters |= {f"{name}_bytes": counters[name] * block_bytes for name in MOVED}
    circuits = {
        "read_circuit_opened": tiers.read_circuit.opened_total,
        "write_circuit_opened": tiers.write_circuit.opened_total,
    }
    return counters | (circuits if tiers.config.storage else {})


def _draft_counters(stats: Stats) -> dict[str, int]:
    accepted = {str(place): count for place, count in enumerate(stats.accepted_drafts)}
    return {"rows": stats.draft_rows, "tokens": stats.drafts, **accepted}


def mode_of(instance: Instance) -> str:
    return "asleep" if instance.worker.state is WorkerState.ASLEEP else instance.mode.value


def beat_of(instance: Instance, fault: str) -> Heartbeat:
    """The heartbeat. `fault`: of the worker. An instance that accepts no requests reports that as its fault. A lost worker is
    being replaced; a ready worker with a fault is stalled."""
    board, mode = instance.board, mode_of(instance)
    return Heartbeat(
        fault=fault or ("" if mode == "serving" else f"it is {mode}"),
        token_seconds=instance.prompt_token_seconds,
        blocks_available=instance.view.blocks_available,
        slots_free=instance.config.scheduler.slots - board.slots.taken,
        waiting_tokens=board.queued_tokens,
        decoding=len(board.running),
        stalled=bool(fault) and instance.worker.state is WorkerState.READY,
        preempted=tuple(instance.view.preempted_requests(PREEMPTED_NAMED_MAX)),
        held=instance.view.held_blocks(HELD_CLASSES_MAX),
    )
