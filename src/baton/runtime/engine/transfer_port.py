"""The TCP sockets at which messengers of other instances dial, to read our KV pools (kvcache/tcp_server.py): one for each rank.

    --transfer-address    listens                              is announced
    HOST:PORT             there, from the start                as it is
    0.0.0.0, [::]         everywhere, from the start           with the address that a session with a router leaves from
    auto                  at that address, any free port       the same
    none                  nowhere

Rank r listens on PORT + r; port 0 is any free one for each. --transfer-announce HOST:PORT is announced instead, from the start,
and PORT + r for rank r: another machine forwards these ports (NAT).

The address of a session is the one that the router's machine sees, whichever of several names or networks led there, and it is
known only when a session is made: a name that resolves late costs nothing. While only routers of this machine were reached, no
port is opened on its own, except for a pool on a GPU: another GPU's process may be unable to map it, and reads it over
loopback.

The engine creates and owns the sockets: they outlive the cache services that serve them, and their successors serve the same.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from typing import Final

from baton.addresses import Address, of_ranks, parse_listening, parse_router
from baton.errors import InvalidConfig

logger = logging.getLogger("baton.engine")

BACKLOG: Final = 64
OPTION: Final = "transfer-address"
ANY_IPV4: Final = "0.0.0.0"
ANY_IPV6: Final = "::"
LOOPBACK: Final = "127.0.0.1"


class TransferPorts:
    def __init__(self, given: str, routers: Sequence[str], announce: str = "", ranks: int = 1) -> None:
        """`given`, `announce`: as in EngineConfig. Raises InvalidConfig if it cannot be listened on, or no router leads to an
        address to announce."""
        self._given = given
        self._fixed = bool(announce)
        "The announced addresses depend on no session."
        self._ranks = ranks
        self.socks: list[socket.socket] = []
        "The socket of each rank. Empty: none, or none yet."
        self.addresses: list[str] = []
        "The announced address of each rank. Empty: none, or none yet."
        self._local = False
        "The announced addresses are valid on this machine only."
        if given not in ("auto", "none"):
            place = parse_listening(given)
            if place.host in (ANY_IPV4, ANY_IPV6) and not announce:
                _require_seen(given, place.host, routers)
            self.socks = _listening(place, ranks)
            if announce:
                self.addresses = [str(each) for each in of_ranks(parse_listening(announce), ranks)]
            elif place.host not in (ANY_IPV4, ANY_IPV6):
                self.addresses = self._announced(place.host)

    def reached(self, host: str, *, on_gpu: bool) -> bool:
        """Record that a session with a router leaves from this address of ours; empty: a unix socket. True: another address is
        announced from now on."""
        host = host or LOOPBACK
        place = None if self._given in ("auto", "none") else parse_listening(self._given)
        if self._fixed or self._given == "none" or (place is not None and place.host not in (ANY_IPV4, ANY_IPV6)):
            return False
        if "%" in host:
            return False  # link-local: valid on one network only
        local = ipaddress.ip_address(host).is_loopback
        if local and not on_gpu:
            return False
        if self.addresses and (local or not self._local):
            return False
        if place is None and not self._open(host):
            return False
        if place is not None and not self._listens_to(host):
            return False
        self._local, self.addresses = local, self._announced(host)
        return True

    def _open(self, host: str) -> bool:
        try:
            socks = _listening(Address(host=host), self._ranks)
        except InvalidConfig as error:
            logger.warning("other instances cannot read our KV cache: %s", error)
            return False
        self.close()
        self.socks = socks
        return True

    def _listens_to(self, host: str) -> bool:
        sock = self.socks[0]
        if sock.family == (socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
        if sock.family == socket.AF_INET6 and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
            return True
        logger.warning(
            "--%s %s does not listen at %s, where routers see this machine: instances of other machines cannot read our KV "
            "cache; give [::]:PORT, or that address",
            OPTION,
            self._given,
            host,
        )
        return False

    def _announced(self, host: str) -> list[str]:
        return [str(Address(host=host, port=sock.getsockname()[1])) for sock in self.socks]

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.socks = []


def _require_seen(given: str, host: str, routers: Sequence[str]) -> None:
    """Raise InvalidConfig unless some router could lead to an address to announce. A host name is resolved only when it is
    dialled."""
    places = [host for host in map(_router_host, routers) if host is not None]
    if all(_is_loopback(place) for place in places):
        raise InvalidConfig(f"--{OPTION} {given}: give an address that other machines reach; none follows from the router's")
    if host == ANY_IPV4 and all(":" in place for place in places):
        raise InvalidConfig(f"--{OPTION} {given}: it listens on IPv4, and the router's address is IPv6; give [::]:PORT")
    if host == ANY_IPV6 and not socket.has_dualstack_ipv6() and all(_is_ipv4(place) for place in places):
        raise InvalidConfig(f"--{OPTION} {given}: this machine listens on IPv6 alone, and the router's address is IPv4")


def _router_host(router: str) -> str | None:
    """The host by which a router is dialled; empty: known later, from a file. None: a unix socket."""
    place = parse_router(router)
    if isinstance(place, Address):
        return None if place.path else place.host
    return "" if place.name is None else place.name.host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def _listening(place: Address, ranks: int) -> list[socket.socket]:
    """A socket for each rank. Raises InvalidConfig, and leaves none open."""
    with contextlib.ExitStack() as undo:
        socks = [undo.enter_context(_listening_at(each)) for each in of_ranks(place, ranks)]
        undo.pop_all()
    return socks


def _listening_at(place: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    both = place.host == ANY_IPV6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((place.host, place.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        # create_server adds to the system's text, and errors of names have numbers of their own
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        remedy = "give an address of this machine and a port that is free (0: any)"
        raise InvalidConfig(f"--{OPTION}: cannot listen on {place.host}:{place.port} ({why}); {remedy}") from None
