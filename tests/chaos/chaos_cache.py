"""The cache service, disturbed: pulls wait at a gate (chaos_gates.py)."""

from __future__ import annotations

import asyncio
import sys

from chaos_gates import POLL_SECONDS, Gate

from baton.protocol.codec import Message
from baton.protocol.moves import BlockMove
from baton.runtime import cache


class ChaosCache(cache.CacheProcess):
    def __init__(self, *settings: object) -> None:
        super().__init__(*settings)  # type: ignore[arg-type]
        self._gate = Gate("pull")
        self._held: list[asyncio.Task[None]] = []

    def on_message(self, message: Message) -> None:
        if isinstance(message, BlockMove) and message.kind == "pull" and self._gate.closed:
            self._held.append(asyncio.create_task(self._later(message)))
        else:
            super().on_message(message)

    async def _later(self, message: Message) -> None:
        while self._gate.still_closed:
            await asyncio.sleep(POLL_SECONDS)
        super().on_message(message)


if __name__ == "__main__":
    sys.exit(cache.main(ChaosCache))
