"""Pings one child over its control channel and kills it if it does not answer (core/child_silence.py). The child's side is
`answer_parent`.

The parent asks, rather than the child reporting by itself: a parent that is stopped for long leaves no unread messages, which
would end the channel, and a child needs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.core.child_silence import ChildSilence
from baton.protocol.codec import Message
from baton.protocol.control import Ping, Pong
from baton.protocol.ids import Instant
from baton.runtime.processes.child import Child
from baton.runtime.wire.channel import Channel

PING = 0
"""Number of a parent's pings: one is open at a time."""


class SilenceWatch:
    """Watches a child from its start until `close`."""

    def __init__(self, child: Child, seconds_max: float) -> None:
        self._child = child
        self._silence = ChildSilence(seconds_max)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_soon(self._observe)
        self.answered = self._silence.answered

    def close(self) -> None:
        self._timer.cancel()

    def _observe(self) -> None:
        order = self._silence.observe(Instant(self._loop.time()))
        if order == "kill":
            self._child.silent_seconds = self._silence.seconds
            self._child.kill()  # its end is handled like any other
            return
        if order == "ping":
            self._child.control.send(Ping(PING))
        self._timer = self._loop.call_later(self._silence.period_seconds, self._observe)


async def answer_parent(parent: Channel, on_message: Callable[[Message], None] = lambda message: None) -> None:
    """Answer the pings of the parent process, until its channel ends: they prove that this event loop runs."""

    def take(message: Message) -> None:
        if type(message) is Ping:
            parent.send(Pong(message.number))
        else:
            on_message(message)

    await parent.listen(take)
