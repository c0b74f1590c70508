"""Looks up addresses of routers: names at the name server, files on disk. core/discovery.py decides when, and what follows."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final

from baton.addresses import Address, RouterSource, parse_address_lines, parse_router
from baton.core.discovery import (
    Dial,
    Discovery,
    DiscoveryEffect,
    DiscoveryEvent,
    DiscoveryTick,
    Found,
    GiveUp,
    LookUp,
    NotFound,
    SourceChanged,
)
from baton.errors import InvalidConfig
from baton.repeats import printable
from baton.runtime.driver import Driver
from baton.trust.dialling import resolved

logger = logging.getLogger("baton.cluster")

FILE_BYTES_MAX: Final = 64 * 1024


class RouterSources:
    def __init__(
        self,
        routers: Sequence[str],
        dial: Callable[[str], None],
        give_up: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`routers`: as in EngineConfig. `on_error`: reports an error here, which is a bug."""
        places = [parse_router(router) for router in routers]
        self._sources = {str(place): place for place in places if isinstance(place, RouterSource)}
        fixed = [str(place) for place in places if isinstance(place, Address)]
        ports: dict[type[Any], Callable[[Any], None]] = {
            LookUp: self._look_up,
            Dial: lambda effect: dial(effect.address),
            GiveUp: lambda effect: give_up(effect.address),
            SourceChanged: _log,
        }
        self._driver: Driver[DiscoveryEvent, DiscoveryEffect] = Driver(Discovery(fixed, [*self._sources]), ports, self._tick)
        self._lookups: dict[asyncio.Task[None], None] = {}
        self._on_error = on_error

    def start(self) -> None:
        self.dispatch(DiscoveryTick())

    def close(self) -> None:
        self._driver.close()
        for task in self._lookups:
            task.cancel()

    def dispatch(self, event: DiscoveryEvent) -> None:
        self._driver.dispatch(event)

    def _tick(self) -> None:
        try:
            self.dispatch(DiscoveryTick())
        except Exception as error:  # the loop would only log the error
            self._on_error(error)

    def _look_up(self, effect: LookUp) -> None:
        task = asyncio.create_task(self._answer(effect.source))
        self._lookups[task] = None
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._lookups.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _answer(self, source: str) -> None:
        event: DiscoveryEvent
        try:
            event = Found(source, tuple(map(str, await addresses_of(self._sources[source]))))
        except (OSError, InvalidConfig, UnicodeError) as error:
            event = NotFound(source, getattr(error, "strerror", None) or str(error) or type(error).__name__)
        self.dispatch(event)


def _log(changed: SourceChanged) -> None:
    logger.log(logging.INFO if changed.found else logging.WARNING, "%s: %s", changed.source, printable(changed.text))


async def addresses_of(source: RouterSource) -> tuple[Address, ...]:
    """Addresses in the source. Raises OSError or InvalidConfig if the source has no readable answer."""
    if source.name is None:
        return parse_address_lines(_read(source.path))
    places = await resolved(source.name)
    # A router has one session with an instance: addresses of both families would give two.
    hosts: list[Any] = [place for family, place in places if family == places[0][0] and family != socket.AF_UNIX]
    return tuple(Address(host=str(host[0]), port=source.name.port) for host in hosts)


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK a named pipe would block
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidConfig("it is no file")
        content = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(content) > FILE_BYTES_MAX:
        raise InvalidConfig(f"it has more than {FILE_BYTES_MAX} bytes")
    return content.decode()
