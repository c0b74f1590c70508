"""Loops that end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run it; what hangs fails here and not in CI's time-out."""
    return asyncio.run(asyncio.wait_for(work, 60))
