"""How a child ended: who did it decides whether what it computed is suspect."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.runtime.processes.child import Child
from baton.runtime.processes.process_table import ENGINE_CHILDREN


def ended_with(code: int, memory: Any) -> Child:
    process: Any = SimpleNamespace(poll=lambda: code, returncode=code, pid=1)
    control: Any = SimpleNamespace(close=lambda: None)
    return Child(ENGINE_CHILDREN[0], 1, process, control, None, memory)


@pytest.mark.parametrize(
    ("code", "memory_was_short", "cause"),
    [
        (-signal.SIGKILL, False, "killed"),
        (-signal.SIGTERM, False, "killed"),
        (-signal.SIGKILL, True, "died"),  # the kernel did it, and for what the child did
        (-signal.SIGSEGV, False, "died"),
        (1, False, "died"),
        (0, False, "died"),
    ],
)
def test_only_a_kill_from_outside_is_no_fault_of_its_own(code: int, memory_was_short: bool, cause: str):
    child = ended_with(code, SimpleNamespace(since=lambda: (int(memory_was_short), None)))

    async def main() -> None:
        loss = await child.end(1.0)
        assert (loss.cause, loss.code) == (cause, code)

    finish(main())
