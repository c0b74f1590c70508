"""The TCP socket at which messengers of other machines dial, to read our KV pool (kvcache/tcp_server.py).

The engine makes it and keeps it: it outlives the cache service that serves it, and the successor serves the same one. What is
announced is an address that others reach; where people give none, it is the one that the way to the router begins at.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from typing import Final

from baton.addresses import Address, parse_address, parse_listening
from baton.errors import InvalidConfig
from baton.trust.session import resolved

logger = logging.getLogger("baton.engine")

BACKLOG: Final = 64
RESOLVE_SECONDS: Final = 5.0
"""For the router's name: the start waits for it."""
OPTION: Final = "transfer-address"
EVERYWHERE: Final = ("0.0.0.0", "::")


class TransferPort:
    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock = sock
        self.address = str(Address(host=host, port=sock.getsockname()[1]))

    def close(self) -> None:
        self.sock.close()


async def open_transfer_port(given: str, routers: Sequence[str]) -> TransferPort | None:
    """`given`: as EngineConfig has it. None: no other machine may read, or none is there."""
    if given == "none":
        return None
    if given == "auto":
        host = await _host_towards(routers)
        return None if host is None else _listening(Address(host=host), host)
    place = parse_listening(given)
    host = await _host_towards(routers) if place.host in EVERYWHERE else place.host
    if host is None:
        raise InvalidConfig(f"--{OPTION} {given}: give an address that other machines reach; none follows from the router's")
    return _listening(place, host)


def _listening(place: Address, announced: str) -> TransferPort:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        return TransferPort(socket.create_server((place.host, place.port), family=family, backlog=BACKLOG), announced)
    except OSError as error:
        # create_server adds to what the system says, and names have numbers of their own.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        remedy = "give an address of this machine and a port that is free (0: any)"
        raise InvalidConfig(f"--{OPTION}: cannot listen on {place.host}:{place.port} ({why}); {remedy}") from None


async def _host_towards(routers: Sequence[str]) -> str | None:
    """Our address on the way to the first router that is on another machine."""
    for router in routers:
        address = parse_address(router)
        if address.path:
            continue
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                places = await resolved(address)
            for family, place in places:
                host = _own_address(family, place)
                if host is not None and not ipaddress.ip_address(host).is_loopback:
                    return host
        except OSError as error:
            logger.warning(
                "%s cannot be found (%s): instances on other machines cannot read our KV cache, unless --%s is given",
                router,
                str(error) or "no answer",
                OPTION,
            )
    return None


def _own_address(family: int, place: object) -> str | None:
    """Where packets to that place leave from. Nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)  # type: ignore[arg-type]
        except OSError:
            return None
        host = str(probe.getsockname()[0])
        return None if "%" in host else host  # link-local: means something on this machine only
