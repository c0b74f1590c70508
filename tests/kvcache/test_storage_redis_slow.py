"""A Redis that answers a byte now and then, without end, or with what it was asked: deadlines hold, no password is shown."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest
from storage_rig import Rig, layout_of

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.open import check_address, open_backend
from baton.kvcache.storage.resp import Connection, RedisAddress

PASSWORD = "geheim-1234"
OBJECT = b"$1128\r\n" + b"x" * 1130


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


@contextmanager
def server(reply: bytes, *, seconds_a_byte: float = 0.0) -> Iterator[int]:
    """Sends this to whoever connects, whatever it is asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    links = []

    def drip(link: socket.socket) -> None:
        try:
            if not seconds_a_byte:
                link.recv(65536)
                link.sendall(reply)
                return
            for place in range(len(reply)):
                if over.wait(seconds_a_byte):
                    return
                link.sendall(reply[place : place + 1])
        except OSError:
            return  # it was closed: that is what it is for

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            links.append(link)
            threading.Thread(target=drip, args=[link], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        listener.close()
        for link in links:
            link.close()


@pytest.mark.parametrize("reply", [OBJECT, b"-ERR " + b"x" * 4000, b":" + b"1" * 900], ids=["object", "error", "number"])
@pytest.mark.parametrize("call", ["get", "contains_prefix", "put"])
def test_a_server_that_drips_does_not_stretch_the_deadline(rig: Rig, reply: bytes, call: str):
    with server(reply, seconds_a_byte=0.05) as port:
        backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
        deadline = Deadline.after(0.2)
        blocks = {"get": [memoryview(bytearray(1000))], "put": rig.blocks([0])}
        with pytest.raises(StorageFailed) as failed:
            getattr(backend, call)(rig.keys([0]), *([blocks[call]] if call in blocks else []), deadline)
        assert failed.value.reason == "timeout"
        assert monotonic() < deadline.at + 10, "the whole reply takes half a minute or more"
        backend.close()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("baton.kvcache.storage.backend.monotonic", lambda: self.now)


class SilentSocket:
    """Never connects, and takes a byte per write, each as late as its timeout allows."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seconds = clock, 0.0
        self.connects = self.writes = 0

    def settimeout(self, seconds: float) -> None:
        self._seconds = seconds

    def connect(self, address: object) -> None:
        self.connects += 1
        self._clock.now += self._seconds
        raise TimeoutError

    def send(self, data: memoryview) -> int:
        self.writes += 1
        self._clock.now += 0.9 * self._seconds
        return 1

    def sendall(self, data: memoryview) -> None:
        for _ in range(len(data)):
            self.send(data)

    def close(self) -> None: ...


def test_silent_addresses_of_a_host_share_the_deadline(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    silent = SilentSocket(clock)
    monkeypatch.setattr(socket, "socket", lambda *_: silent)
    address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 6379))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 6)
    with pytest.raises(TimeoutError):
        Connection(RedisAddress(host="192.0.2.1", port=6379), Deadline.after(0.3))
    assert silent.connects == 6, "none is left out"
    assert clock.now == pytest.approx(0.3)


def test_a_name_server_that_does_not_answer_is_given_up_and_asked_once(monkeypatch: pytest.MonkeyPatch):
    answer, asked = threading.Event(), []
    real = socket.getaddrinfo

    def silent(host: str, port: int, *more: int, flags: int = 0, **others: int) -> list[object]:
        if flags:
            return real(host, port, *more, flags=flags, **others)
        asked.append(host)
        answer.wait(60)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            Connection(RedisAddress(host="redis.example", port=6379), Deadline.after(0.01))
    assert asked == ["redis.example"]
    answer.set()


def test_writes_through_tls_share_the_deadline(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    slow = SilentSocket(clock)
    connection = Connection.__new__(Connection)
    connection._socket, connection._tls = slow, True  # type: ignore[assignment]
    connection.arm(Deadline.after(0.3))
    with pytest.raises(TimeoutError):
        connection.send([b"x" * 1000])
    assert clock.now < 0.31
    assert slow.writes > 1


def test_a_server_that_sends_no_end_of_a_line_is_given_up_soon(rig: Rig):
    with server(b"+" + b"y" * (1 << 20)) as port:
        backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
        with pytest.raises(StorageFailed) as failed:
            backend.contains_prefix(rig.keys([0]), Deadline.after(30))
        assert failed.value.reason == "protocol", "and not when its time is up"


def test_lines_that_are_cut_anywhere_are_counted_once(rig: Rig):
    replies = b":1128\r\n" * 3 + b":-1\r\n"
    for seconds in (0.0, 0.001):
        with server(replies, seconds_a_byte=seconds) as port:
            backend = open_backend(f"redis://127.0.0.1:{port}", rig.layout)
            assert backend.contains_prefix(rig.keys(range(4)), Deadline.after(30)) == 3
            backend.close()


@pytest.mark.parametrize(
    "reply",
    [
        f"-ERR unknown command 'AUTH', with args beginning with: 'baton' '{PASSWORD}' \r\n",
        f"-{PASSWORD}\r\n",
        f"-WRONGPASS {PASSWORD}\r\n",
        f"+{PASSWORD} and more\r\n+OK\r\n+OK\r\n",
    ],
)
def test_a_password_that_the_server_echoes_is_not_shown(reply: str):
    with server(reply.encode()) as port:
        address = RedisAddress(host="127.0.0.1", port=port, user="baton", password=PASSWORD)
        with pytest.raises(StorageFailed) as failed:
            Connection(address, Deadline.after(10))
        assert "geheim" not in str(failed.value)
        if reply.startswith("-ERR"):
            assert str(failed.value).endswith("refuses AUTH or SELECT: ERR")


@pytest.mark.parametrize("password", ["geheim\\1234", "geheim'12\"34", "geheim-\u00e91234", "geheim\t1234", "geheim\r\n1234"])
@pytest.mark.parametrize(
    "reply", ["+%s and more\r\n+OK\r\n+OK\r\n", "+OK\r\n+%s\r\n", "+OK\r\n+an\u00e9 %s", "-ERR no %s here\r\n+OK\r\n"]
)
def test_a_password_that_reads_otherwise_in_a_text_is_not_shown_either(reply: str, password: str):
    """`repr` and a decoder write some characters in another way: the password was looked for in what they had written."""
    connection = Connection.__new__(Connection)
    connection._address = RedisAddress(host="127.0.0.1", port=6379, user="baton", password=password)
    line = (reply % password).encode()
    for failed in (connection.error(line), connection.unexpected(line)):
        assert "geheim" not in str(failed)
        assert "1234" not in str(failed)
        assert "***" in str(failed)
    for length in range(1, len(password.encode())):  # the rest has not arrived
        cut = line[: line.index(password.encode()) + length]
        assert password[:length] not in str(connection.unexpected(cut)).partition("fit: b")[2]


@pytest.mark.parametrize(
    "url",
    [
        "redis://[::1/0",
        f"redis://me:{PASSWORD}@[::1/0",
        f"redis://me:{PASSWORD}\u2100@host/0",
        f"redis://me:ge/{PASSWORD}@host/0",
        f"redis://me:{PASSWORD}@host:port/0",
        f"redis://me:{PASSWORD}@host/0?broken",
        f"redis://me:{PASSWORD}@host/database",
        f"redis:me:{PASSWORD}@host",
        f"redis+unix:me:{PASSWORD}@host",
        f"file:me:{PASSWORD}@host?quota=1",
        f"//me:{PASSWORD}@host",
        f"mooncake:me:{PASSWORD}@host",
        f"nosuch://me:{PASSWORD}@host",
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anything_is_loaded_and_without_its_password(url: str):
    with pytest.raises(InvalidConfig) as wrong:
        check_address(url)
    assert "geheim" not in str(wrong.value)
    with pytest.raises(InvalidConfig) as wrong:
        open_backend(url, layout_of())
    assert "geheim" not in str(wrong.value)


@pytest.mark.parametrize("url", ["file:/not/made/yet?quota_gib=3", "redis://host:1/0?ttl_hours=2", "redis+unix:/a/b"])
def test_an_address_that_may_work_is_checked_without_opening_anything(url: str):
    check_address(url)
