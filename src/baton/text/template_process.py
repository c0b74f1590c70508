"""The process in which chat templates run (helper.py): a template comes with the model, so it is foreign code.

One child serves all templates of this process. At a template's deadline it is killed, and the next chat starts another.
"""

from __future__ import annotations

import atexit
from functools import cache
from typing import Final, cast

from baton.text.helper import Helper, HelperCrash
from baton.text.template_wire import Reply, Request

MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Bytes of the child's address space. 192 MiB are enough for the largest chat: 8 Mi characters of four bytes."""


class TemplateProcess(Helper):
    def __init__(self, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        super().__init__("baton.text.template_child", "chat templates", memory_bytes_max=memory_bytes_max)

    def render(self, request: Request, seconds: float, reply_bytes_max: int) -> Reply:
        """Render a template. Raises like `Helper.ask`."""
        reply = self.ask(request, seconds, reply_bytes_max)
        if not isinstance(reply, list) or len(reply) != 2:
            raise HelperCrash
        return cast(Reply, tuple(reply))


@cache
def shared_process() -> TemplateProcess:
    """The process that all templates share."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process
