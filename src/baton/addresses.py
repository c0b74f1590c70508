"""Addresses of cluster ports of routers (TCP or unix sockets), and of KV pools that other instances read (TCP).

tcp://10.0.0.5:9100    10.0.0.5:9100    tcp://[::1]:9100    unix:/run/baton/router.sock

Sources of router addresses: dns://NAME:PORT, every address of the name, and file:PATH, an address per line.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from baton.errors import InvalidConfig

EVERYWHERE = ("0.0.0.0", "::")
"""Hosts to listen on that are not addresses to connect to."""
UNIX_PATH_BYTES_MAX = 107
"""Bytes of the longest path of a socket: the kernel's limit."""


class Address(NamedTuple):
    """Address of a socket: either host and port, or a path."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address from its text. Raises InvalidConfig with the error and the correct form."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or "\0" in path or len(path.encode()) > UNIX_PATH_BYTES_MAX:
            raise InvalidConfig(f"{text!r} is no unix socket: give unix:/PATH, of at most {UNIX_PATH_BYTES_MAX} bytes")
        return Address(path=path)
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme != "tcp":
        raise InvalidConfig(f"{text!r} is no address of a router's cluster port: give tcp://HOST:PORT or unix:/PATH")
    address = _host_and_port(rest)
    if address is None or not address.port:
        raise InvalidConfig(f"{text!r} is no address: give tcp://HOST:PORT, with a port from 1 to 65535, or unix:/PATH")
    return address


class RouterSource(NamedTuple):
    """Source of routers' addresses, which may change: a DNS name with a port, or a file."""

    name: Address | None = None
    path: str = ""

    def __str__(self) -> str:
        return f"file:{self.path}" if self.name is None else str(self.name).replace("tcp://", "dns://", 1)


def parse_router(text: str) -> Address | RouterSource:
    """The value of --router. Raises InvalidConfig with the error and the correct form."""
    if text.startswith("file:"):
        path = text.removeprefix("file:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or "\0" in path:
            raise InvalidConfig(f"{text!r} is no file of addresses: give file:PATH")
        return RouterSource(path=path)
    if text.startswith("dns://"):
        name = _host_and_port(text.removeprefix("dns://"))
        if name is None or not name.port:
            raise InvalidConfig(f"{text!r} is no name to look up: give dns://NAME:PORT, with a port from 1 to 65535")
        return RouterSource(name=name)
    return parse_address(text)


def parse_address_lines(text: str) -> tuple[Address, ...]:
    """Addresses of a file: one per line, # begins a comment. Raises InvalidConfig with the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if word := line.partition("#")[0].strip():
            try:
                found.append(parse_address(word))
            except InvalidConfig as error:
                raise InvalidConfig(f"line {number}: {error}") from None
    return tuple(found)


def parse_listening(text: str) -> Address:
    """A host and a port to listen on; port 0 is any free one. Raises InvalidConfig."""
    address = _host_and_port(text.removeprefix("tcp://"))
    if address is None:
        raise InvalidConfig(f"{text!r} is no address to listen on: give HOST:PORT, with 0 for any port that is free")
    return address


def of_ranks(place: Address, ranks: int) -> tuple[Address, ...]:
    """Where each rank of an instance listens: on a port of its own, from that one on. Port 0: any free one for each."""
    return tuple(place._replace(port=place.port + rank if place.port else 0) for rank in range(ranks))


def reachable_url(url: str, own_host: str) -> str:
    """URL of this machine for a peer that reaches it at `own_host`; empty `own_host`: the peer is on this machine. Returns an
    empty string if only this machine reaches it."""
    parts = urlsplit(url)
    here = not own_host or _is_loopback(own_host)
    if parts.hostname in EVERYWHERE:
        host = "127.0.0.1" if not own_host else own_host.partition("%")[0]
        return url.replace(parts.netloc, f"{f'[{host}]' if ':' in host else host}:{parts.port}", 1)
    return url if here or not _is_loopback(parts.hostname or "") else ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(text: str) -> Address | None:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    well_formed = bool(colon) and _is_host(bare) and (":" not in bare or host.startswith("["))
    if not well_formed or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        return None
    return Address(host=bare, port=int(port))


def _is_host(name: str) -> bool:
    """Whether the name can be resolved at all. A name that cannot be encoded (an empty label, or one over 63 letters) would
    raise no OSError there, and end an instance with a loaded model."""
    try:
        return bool(name) and name.isprintable() and " " not in name and bool(name.encode("idna"))
    except UnicodeError:
        return False
