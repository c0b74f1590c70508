"""The socket that the server listens on. The command line tries it before anything loads, the front then takes it."""

from __future__ import annotations

import errno
import socket

from baton.errors import InvalidConfig


def bind(host: str, port: int) -> socket.socket:
    """Bound, and not listening yet: until then a client is refused at once and does not wait. Port 0: one that is free."""
    bare = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        (_, _, _, _, address), *_ = socket.getaddrinfo(bare, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"cannot listen on {host}:{port}: --host {host} is not known here ({why})") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise InvalidConfig(f"cannot listen on {host}:{port} ({error.strerror}); {_remedy(error.errno)}") from None
    return sock


def _remedy(number: int | None) -> str:
    if number == errno.EADDRNOTAVAIL:
        return "--host must be an address of this machine, or 0.0.0.0 for all of them"
    if number == errno.EACCES:
        return "ports below 1024 need rights that this user does not have: give another --port"
    return "end the program that listens there, or give another --port (--port 0 takes a free one)"


def usable_port(host: str, port: int) -> int:
    """The port, if it can be listened on now; for 0, one that is free."""
    with bind(host, port) as sock:
        try:
            sock.listen(1)
        except OSError as error:
            raise InvalidConfig(f"cannot listen on {host}:{port} ({error.strerror}); {_remedy(error.errno)}") from None
        return int(sock.getsockname()[1])
