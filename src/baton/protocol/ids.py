"""Look-alike numbers, each with its own type, so that mypy finds a mix-up."""

from __future__ import annotations

from typing import NewType

Instant = NewType("Instant", float)
"""Seconds of the shell's monotonic clock. The core never reads a clock; time is an argument."""

RequestId = NewType("RequestId", str)
"""Opaque id of a request, unique among the open ones of an instance."""

Slot = NewType("Slot", int)
"""A place on the worker, 0 <= slot < slots."""

Incarnation = NewType("Incarnation", int)
"""Number of a slot's use. It grows on every reuse, never decreases, survives worker restarts."""

StepNo = NewType("StepNo", int)
"""Number of a plan and of its result. It grows by one, is never reused, survives worker restarts."""

WorkerEpoch = NewType("WorkerEpoch", int)
"""Number of a life of the worker. Results of an earlier life are ignored."""

PoolIncarnation = NewType("PoolIncarnation", int)
"""Number of a KV pool, drawn by its creator; equal values mean the same memory with the same content."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool."""

HostBlockId = NewType("HostBlockId", int)
"""Index of a KV block in the host pool."""

Generation = NewType("Generation", int)
"""Number of a block's use. It grows every time the block is taken."""

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 of a block's content and all content before it (core/kv/block_hash.py). The same on every tier."""

MoveId = NewType("MoveId", int)
"""Number of a block move, or of a storage query. Never reused, survives the cache service."""
