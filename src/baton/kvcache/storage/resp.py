"""One connection to a Redis or Valkey server, with just enough of its protocol (RESP2) to move large values without copies.

A client library reads a value into its own memory and passes it on; here the kernel writes it into its target. Timeouts are the
socket's own (`SO_RCVTIMEO`), so that one `recv` may wait for a whole object. They apply to one system call, so the rest of the
deadline is set again before each wait: a server that sends single bytes cannot exceed it.

No error text here contains the password: a server may answer with the arguments of a command.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.errors import StorageFailed, StorageReason
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.lookup import resolve

Buffer: TypeAlias = bytes | bytearray | memoryview
Reply: TypeAlias = "bytes | int | StorageFailed | list[Reply] | None"
"""Reply of any type. An error reply is the error that it means."""

REASONS: dict[str, StorageReason] = {
    "OOM": "full",
    "NOAUTH": "denied",
    "WRONGPASS": "denied",
    "NOPERM": "denied",
    "READONLY": "denied",
    "LOADING": "unreachable",
    "MASTERDOWN": "unreachable",
}
"""Errors by the first word of an error reply."""

WRONG_TYPE = b"-WRONGTYPE"
LINE_BYTES_MAX = 1024
"""Maximum length of a status, number or error."""
BULK_BYTES_MAX = 2**20
"""Maximum length of a value that `read_replies` accepts: names of objects."""
ARM_AGAIN_SECONDS = 0.005
"""Seconds by which the socket's own timeout may exceed the rest of the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    host: str = ""
    port: int = 0
    socket_path: str = ""
    "Path of a unix socket, in place of host and port."
    tls: bool = False
    ca_file: str | None = None
    "File of certificates to trust, in place of the system's."
    user: str = ""
    password: str = ""
    database: int = 0

    def __repr__(self) -> str:  # without the password
        return self.socket_path or f"{self.host}:{self.port}"


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Connection:
    """A connection to the server. Raises OSError if the socket fails (TimeoutError after the deadline) and StorageFailed for
    error replies."""

    def __init__(self, address: RedisAddress, deadline: Deadline) -> None:
        self._address = address
        self.in_step = True
        "Whether every command is answered, so that the connection can be reused."
        self._deadline = deadline
        self._armed_seconds = 0.0
        self._socket = _connect(address, deadline)
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        try:
            self.arm(deadline)
            self._introduce()
        except BaseException:
            self.close()
            raise

    def _introduce(self) -> None:
        address, words = self._address, []
        if address.password:
            user = [address.user.encode()] if address.user else []
            words.append(command(b"AUTH", *user, address.password.encode()))
        if address.database:
            words.append(command(b"SELECT", str(address.database).encode()))
        if words:
            self.send(words)
            try:
                self.read_lines(len(words))
            except StorageFailed as failed:
                raise StorageFailed(failed.reason, f"{self._named} refuses AUTH or SELECT: {_first_word(failed)}") from None

    @property
    def _named(self) -> str:
        return f"Redis at {self._address!r}"

    def arm(self, deadline: Deadline) -> None:
        """Set the deadline of the following calls."""
        self._deadline, self._armed_seconds = deadline, float("inf")
        self._before_wait()

    def _before_wait(self) -> None:
        """Raise TimeoutError if the deadline has passed, and limit the next system call to the rest of it."""
        seconds = self._deadline.left()
        if seconds <= 0:
            raise TimeoutError
        if self._armed_seconds - seconds < ARM_AGAIN_SECONDS:
            return
        self._armed_seconds = seconds
        if self._tls:
            self._socket.settimeout(seconds)
            return
        microseconds = max(1, int(seconds * 1e6))  # zero would mean: wait for ever
        value = struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, parts: Sequence[Buffer]) -> None:
        if self._tls:
            for part in parts:
                rest = memoryview(part)
                while rest:  # `sendall` would give each of its writes the whole time
                    self._before_wait()
                    rest = rest[self._socket.send(rest) :]
            return
        left = [memoryview(part) for part in parts]
        while left:
            self._before_wait()
            try:
                sent = self._socket.sendmsg(left[:512])
            except BlockingIOError:
                raise TimeoutError
            left = _after(left, sent)

    def receive(self, parts: Sequence[memoryview]) -> None:
        """Fill all of these buffers."""
        left = list(parts)
        while left:
            self._before_wait()
            try:
                if self._tls:
                    count = self._socket.recv_into(left[0])
                else:
                    count, *_ = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError
            if not count:
                raise ConnectionResetError("the server has closed the connection")
            left = _after(left, count)

    def read_lines(self, count: int) -> list[bytes]:
        """Read `count` replies of one line each: status or number. No other reply may be on its way.

        A key with a value of another type is no failure of the server: such a line is returned as it is.
        """
        data, ends = bytearray(), 0
        while ends < count:
            more = self._receive_some()
            scanned_to = max(0, len(data) - 1)
            data += more
            ends += data.count(b"\r\n", scanned_to)
            if len(data) > LINE_BYTES_MAX * (ends + 1):
                raise self.unexpected(bytes(data[:LINE_BYTES_MAX]))
        lines = bytes(data).split(b"\r\n")
        if len(lines) != count + 1 or lines[-1]:
            raise self.unexpected(lines[count])
        for line in lines:
            if line.startswith(b"-") and not line.startswith(WRONG_TYPE):
                raise self.error(line)
        return lines[:-1]

    def read_replies(self, count: int) -> list[Reply]:
        """Read `count` replies of any type, for tools: everything passes through memory of ours. No other reply may be on its
        way."""
        data, at, replies = bytearray(), 0, list[Reply]()
        while len(replies) < count:
            try:
                reply, at = self._parsed(data, at)
                replies.append(reply)
            except IndexError:  # a reply is incomplete
                del data[:at]
                at = 0
                data += self._receive_some()
        if at != len(data):
            raise self.unexpected(bytes(data[at:]))
        return replies

    def _receive_some(self) -> bytes:
        self._before_wait()
        try:
            more = self._socket.recv(65536)
        except BlockingIOError:
            raise TimeoutError
        if not more:
            raise ConnectionResetError("the server has closed the connection")
        return more

    def _parsed(self, data: bytearray, at: int) -> tuple[Reply, int]:
        """The reply that begins at `at`, and where it ends. Raises IndexError if more bytes are needed."""
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > LINE_BYTES_MAX:
                raise self.unexpected(bytes(data[at:]))
            raise IndexError
        kind, line = bytes(data[at : at + 1]), bytes(data[at + 1 : end])
        if kind == b"+":
            return line, end + 2
        if kind == b"-":
            return self.error(b"-" + line), end + 2
        if kind not in (b":", b"$", b"*") or not re.fullmatch(rb"-?[0-9]{1,12}", line):
            raise self.unexpected(bytes(data[at:end]))
        number, at = int(line), end + 2
        if kind == b":":
            return number, at
        return self._bulk(data, at, number) if kind == b"$" else self._array(data, at, number)

    def _bulk(self, data: bytearray, at: int, length: int) -> tuple[Reply, int]:
        if length < 0:
            return None, at
        if length > BULK_BYTES_MAX:
            raise self.unexpected(b"$%d" % length)
        if len(data) < at + length + 2:
            raise IndexError
        return bytes(data[at : at + length]), at + length + 2

    def _array(self, data: bytearray, at: int, count: int) -> tuple[Reply, int]:
        found: list[Reply] = []
        for _ in range(count):
            reply, at = self._parsed(data, at)
            found.append(reply)
        return found, at

    def read_rest_of_line(self, begin: bytes) -> bytes:
        """Read the rest of a line that starts with `begin`, byte by byte: for unusual replies."""
        line = bytearray(begin)
        one = memoryview(bytearray(1))
        while not line.endswith(b"\r\n") and len(line) < LINE_BYTES_MAX:
            self.receive([one])
            line += one
        return bytes(line).removesuffix(b"\r\n")

    def error(self, line: bytes) -> StorageFailed:
        reason = REASONS.get(line[1:].split(b" ")[0].decode("ascii", "replace"), "protocol")
        text = self._without_password(line[1:]).decode("ascii", "replace")
        return StorageFailed(reason, f"{self._named} answers: {text[:200]}")

    def unexpected(self, line: bytes) -> StorageFailed:
        text = repr(self._without_password(line))
        return StorageFailed("protocol", f"{self._named} gave an answer that does not fit: {text[:40]}")

    def _without_password(self, line: bytes) -> bytes:
        """The bytes as they came, because a text of them may write the password in another way. At the end there may be a part
        of it: the rest has not arrived, or was cut off."""
        password = self._address.password.encode()
        line = line.replace(password, b"***") if password else line
        for length in range(min(len(password) - 1, len(line)), 0, -1):
            if line.endswith(password[:length]):
                return line[:-length] + b"***"
        return line

    def close(self) -> None:
        self._socket.close()


def _connect(address: RedisAddress, deadline: Deadline) -> socket.socket:
    made = _connect_unix(address.socket_path, deadline) if address.socket_path else _connect_tcp(address, deadline)
    try:
        if address.tls:
            context = ssl.create_default_context(cafile=address.ca_file)
            made.settimeout(_left(deadline))
            return context.wrap_socket(made, server_hostname=address.host)
        made.settimeout(None)
    except BaseException:
        made.close()
        raise
    return made


def _left(deadline: Deadline) -> float:
    seconds = deadline.left()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _connect_unix(path: str, deadline: Deadline) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_left(deadline))
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


def _connect_tcp(address: RedisAddress, deadline: Deadline) -> socket.socket:
    """Try the host's addresses in order. Each gets an equal share of the time that is left, so that silent ones leave time for
    those behind them."""
    found = resolve(address.host, address.port, deadline)
    for place, (family, kind, protocol, _, where) in enumerate(found):
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left(deadline) / (len(found) - place))
            made.connect(where)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError:
            made.close()
            if place == len(found) - 1:
                raise
        except BaseException:
            made.close()
            raise
    raise OSError(f"{address.host} has no address")


def _first_word(failed: StorageFailed) -> str:
    """First word of an error reply to a command with the password: the rest may be its arguments."""
    word = str(failed).partition(" answers: ")[2].split(" ")[0]
    return word if re.fullmatch("[A-Z]{1,20}", word) else "an error"


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """The rest of these parts after the first `count` bytes."""
    for place, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[place + 1 :]]
        count -= part.nbytes
    return []
