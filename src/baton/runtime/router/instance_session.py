"""One instance in the router's process: its session, its last reports, and its orders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from msgspec.structs import fields

from baton.core.cluster.events import Session
from baton.protocol.codec import Message
from baton.protocol.control import InstanceStats
from baton.protocol.instance import Heartbeat, InstanceHello, InstanceRefused, InstanceView, RouterHello
from baton.protocol.numbers import Counter
from baton.repeats import printable
from baton.runtime.front.orders import Orders
from baton.runtime.wire.channel import Channel


class InstanceSession:
    def __init__(self, session: Session, hello: InstanceHello, channel: Channel, suspect_seconds: float) -> None:
        """`suspect_seconds`: an instance that is silent for this long is suspect (core/cluster/membership.py)."""
        self.session = session
        self.hello = hello
        self.channel = channel
        self.orders = Orders(self.send)
        self._suspect_seconds = suspect_seconds
        self.stats = InstanceStats()
        self.beat = Heartbeat()
        self.received_at = asyncio.get_running_loop().time()
        self._unsent: list[Message] | None = []
        "Messages that wait for the router's hello. None: the hello was sent."

    def send(self, message: Message) -> None:
        if self._unsent is None:
            self.channel.send(message)
        else:
            self._unsent.append(message)

    def welcome(self, hello: RouterHello) -> None:
        """Send the router's hello first, then the messages that the machine has sent meanwhile."""
        unsent, self._unsent = self._unsent or [], None
        for message in (hello, *unsent):
            self.channel.send(message)

    @property
    def welcomed(self) -> bool:
        return self._unsent is None

    def disconnect(self, reason: str, retry_seconds: float) -> None:
        """End the session; the instance receives the reason. Its unanswered orders fail."""
        self.channel.send(InstanceRefused(reason, retry_seconds))
        self.channel.close()  # closes after the message is written
        self.orders.fail(f"the instance {self.hello.name} is gone")

    @property
    def fault(self) -> str:
        """Present fault of the instance, as printable text. Empty: none."""
        silent = asyncio.get_running_loop().time() - self.received_at
        return printable(self.beat.fault) or (f"nothing received for {silent:.1f} s" if silent > self._suspect_seconds else "")

    def view(self) -> InstanceView:
        hello, fault = self.hello, self.fault
        return InstanceView(
            hello.name,
            hello.role,
            "suspect" if fault else "alive",
            fault,
            hello.health_url,
            hello.pid,
            self.stats,
            hello.build,
            hello.peers,
            hello.ready.identity.hex()[:16],
        )


GAUGES = frozenset(
    [
        "running",
        "waiting",
        "preempted",
        "blocks_total",
        "blocks_free",
        "blocks_cached",
        "blocks_held",
        "slots_taken",
        "requests_open",
        "steps_in_flight",
        "loading",
        "host_blocks",
        "host_blocks_cached",
        "routers",
        "loop_lag_microseconds",
        "cache_loop_lag_microseconds",
    ]
)
NUMBERS = tuple(field.name for field in fields(InstanceStats) if field.type == Counter)
TABLES = tuple(field.name for field in fields(InstanceStats) if field.type == dict[str, Counter])


def summed(all_stats: Iterable[InstanceStats]) -> InstanceStats:
    """Sum over all instances. Words (mode, circuit) keep their defaults."""
    total = InstanceStats()
    for stats in all_stats:
        for name in NUMBERS:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in TABLES:
            column = dict(getattr(total, name))
            for key, count in getattr(stats, name).items():
                column[key] = column.get(key, 0) + count
            setattr(total, name, column)
    return total


def counters_of(stats: InstanceStats) -> InstanceStats:
    """The counters that stay in the sum when the instance is lost: counters never decrease."""
    names = (*(name for name in NUMBERS if name not in GAUGES), *TABLES)
    return InstanceStats(**{name: getattr(stats, name) for name in names})
