"""Whether a child process was lost by its own fault or killed from outside. Only its own fault is evidence against what it
computed.

A SIGKILL comes from an operator, or from the kernel when memory is short; the latter is the child's fault. The kernel reports
only how many processes it has killed. So its count is evidence only if it has just grown and this child died of SIGKILL. The
count of the own control group is better than the machine's, which includes other programs.
"""

from __future__ import annotations

from typing import Final

from baton.core.events import LossCause

SIGHUP: Final = 1
SIGINT: Final = 2
SIGKILL: Final = 9
SIGTERM: Final = 15


def is_memory_kill(code: int, group_kills: int | None, machine_kills: int | None) -> bool:
    """Whether the kernel killed the process for lack of memory. `code`: exit status, negative for a signal. `..._kills`:
    processes that the kernel has just killed for lack of memory, in the own control group and on the machine; None if the
    kernel does not report them."""
    kills = machine_kills if group_kills is None else group_kills
    return code == -SIGKILL and bool(kills)


def cause_of_loss(code: int, group_kills: int | None, machine_kills: int | None) -> LossCause:
    """Return "killed" for an operator's signals, which no fault of the child sends. A memory kill by the kernel is "died"."""
    from_outside = -code in (SIGHUP, SIGINT, SIGKILL, SIGTERM) and not is_memory_kill(code, group_kills, machine_kills)
    return "killed" if from_outside else "died"
