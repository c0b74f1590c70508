"""A snapshot of an engine's numbers: made by the runtime from the core's Stats, read by metrics and health."""

from __future__ import annotations

from baton.protocol.control import InstanceStats as EngineStats

__all__ = ["EngineStats"]
