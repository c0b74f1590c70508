"""Why a child process was lost: by its own fault, or killed from outside? Only the first is evidence against what it computed.

A SIGKILL comes from an operator, or from the kernel when memory is short, and then it is the child's fault. The kernel says
only how many processes it has killed, so its count is evidence together with the SIGKILL of this very child, and only if it
has just grown. The count of the own control group is better than that of the machine, where other programs are counted too.
"""

from __future__ import annotations

from typing import Final

from baton.core.events import LossCause

SIGHUP: Final = 1
SIGINT: Final = 2
SIGKILL: Final = 9
SIGTERM: Final = 15


def is_memory_kill(code: int, group_kills: int | None, machine_kills: int | None) -> bool:
    """`code`: exit status, negative for a signal. `..._kills`: processes that the kernel has killed for want of memory a moment
    ago, in the own control group and on the machine; None where it does not say."""
    kills = machine_kills if group_kills is None else group_kills
    return code == -SIGKILL and bool(kills)


def cause_of_loss(code: int, group_kills: int | None, machine_kills: int | None) -> LossCause:
    """No fault of a child sends it the signals of an operator, but for the kernel's."""
    from_outside = -code in (SIGHUP, SIGINT, SIGKILL, SIGTERM) and not is_memory_kill(code, group_kills, machine_kills)
    return "killed" if from_outside else "died"
