"""A router for test_process_group.py. Its first life fails as soon as it listens; the file FAILED_ONCE tells the next one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from baton.protocol.codec import Message
from baton.runtime.router import process


class FailingRouter(process.RouterProcess):
    async def _start(self, *arguments: Any) -> None:
        send = self._supervisor.send

        def and_fail(message: Message) -> None:
            send(message)
            raise OSError("the router fails")

        self._supervisor: Any = SimpleNamespace(send=and_fail)
        await super()._start(*arguments)


if __name__ == "__main__":
    failed = Path(os.environ["FAILED_ONCE"])
    if not failed.exists():
        failed.touch()
        process.RouterProcess = FailingRouter  # type: ignore[misc]
    process.main()
