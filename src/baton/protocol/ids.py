"""Look-alike numbers, each with a type of its own, so that mypy sees a mix-up."""

from __future__ import annotations

from typing import NewType

Instant = NewType("Instant", float)
"""Seconds of the shell's monotonic clock. The core never reads a clock; it is told."""

RequestId = NewType("RequestId", str)
"""Opaque name of a request, unique among the live ones of an instance."""

Slot = NewType("Slot", int)
"""A seat on the worker, 0 <= slot < slots."""

Incarnation = NewType("Incarnation", int)
"""Which occupant of a slot. Grows on every reuse, never falls, survives worker restarts."""

StepNo = NewType("StepNo", int)
"""Number of a plan and of its result. Grows by one, never reused, survives worker restarts."""

WorkerEpoch = NewType("WorkerEpoch", int)
"""Which life of the worker. A result of an earlier life is inert."""

PoolIncarnation = NewType("PoolIncarnation", int)
"""Which KV pool. Drawn by whoever creates one; two equal ones are the same memory with the same content."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool."""

HostBlockId = NewType("HostBlockId", int)
"""Index of a KV block in the host pool."""

Generation = NewType("Generation", int)
"""Which use of a block. Grows every time the block is handed out."""

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 of a block's content and all before it (core/kv/block_hash.py). The same on every tier."""

MoveId = NewType("MoveId", int)
"""Number of a block move, or of a question to storage. Never reused, survives the cache service."""
