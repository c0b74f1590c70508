"""The server's listening socket. The command line tries it before anything loads, the front then opens it."""

from __future__ import annotations

import errno
import socket

from baton.errors import InvalidConfig


def bind(host: str, port: int, prefix: str = "") -> socket.socket:
    """Bind without listening: until `listen` a client is refused at once and does not wait. Port 0: any free port. `prefix`: of
    the options that name host and port."""
    bare = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        (_, _, _, _, address), *_ = socket.getaddrinfo(bare, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"cannot listen on {host}:{port}: --{prefix}host {host} is not known here ({why})") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise InvalidConfig(f"cannot listen on {host}:{port} ({error.strerror}); {_remedy(error.errno, prefix)}") from None
    return sock


def listen(sock: socket.socket, backlog: int, prefix: str = "") -> None:
    """Listen on a bound socket. Two programs may bind one port, but only one of them can listen: the second one fails here."""
    try:
        sock.listen(backlog)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise InvalidConfig(f"cannot listen on {host}:{port} ({error.strerror}); {_remedy(error.errno, prefix)}") from None


def _remedy(number: int | None, prefix: str) -> str:
    if number == errno.EADDRNOTAVAIL:
        return f"--{prefix}host must be an address of this machine, or 0.0.0.0 for all of them"
    if number == errno.EACCES:
        return f"ports below 1024 need rights that this user does not have: give another --{prefix}port"
    free = "" if prefix else " (--port 0 takes a free one)"
    return f"end the program that listens there, or give another --{prefix}port{free}"


def usable_port(host: str, port: int, prefix: str = "") -> int:
    """The port, if a server can listen on it now; for 0, a free one."""
    with bind(host, port, prefix) as sock:
        listen(sock, 1, prefix)
        return int(sock.getsockname()[1])
