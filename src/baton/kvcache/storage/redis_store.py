"""The Redis backend (Valkey and others with the same protocol): one string per object.

Requests are pipelined: while one object is received, the next ones are on their way. The server's own settings limit the store
and choose evictions (`maxmemory`, `maxmemory-policy allkeys-lru`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.counters import Counters
from baton.kvcache.storage.object import HEADER_BYTES, fault_of, seal
from baton.kvcache.storage.resp import WRONG_TYPE, Buffer, Connection, RedisAddress, command
from baton.kvcache.storage.url import StorageURL

PORT = 6379
NAMES = b"baton:kv:"
"""Prefix of the names of objects."""
BYTES_IN_FLIGHT = 8 * 2**20
"""Maximum of bytes requested, or sent, and not yet answered."""
KEYS_PER_QUESTION = 512
IDLE_CONNECTIONS_MAX = 16

Answer = TypeVar("Answer")


def open_redis(url: StorageURL, layout: LayoutName) -> StorageBackend:
    address, ttl_seconds = redis_settings(url)
    return RedisBackend(address, layout, ttl_seconds)


def redis_settings(url: StorageURL) -> tuple[RedisAddress, int]:
    """Address, and seconds after which objects expire. Nothing is opened except the file with the password."""
    url.allow("ttl_hours", "password_file", *(["ca_file"] if url.scheme == "rediss" else []))
    ttl_seconds = int(url.number("ttl_hours", 0, 0, 10**6) * 3600)
    return address_of(url), ttl_seconds


def address_of(url: StorageURL) -> RedisAddress:
    password = _password(url)
    if url.scheme == "redis+unix":
        if not url.path.startswith("/"):
            raise InvalidConfig("a Redis socket needs its path: redis+unix:///run/redis/redis.sock")
        return RedisAddress(socket_path=url.path, user=url.user, password=password)
    database = url.path.strip("/") or "0"
    if not url.host or not database.isdecimal():
        raise InvalidConfig(f"{url!r} is no address of a Redis; write {url.scheme}://host:{PORT}/0")
    return RedisAddress(
        host=url.host,
        port=url.port or PORT,
        tls=url.scheme == "rediss",
        ca_file=url.options.get("ca_file"),
        user=url.user,
        password=password,
        database=int(database),
    )


def _password(url: StorageURL) -> str:
    path = url.options.get("password_file")
    if path is None:
        return url.password
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(f"password_file {path} of {url!r} cannot be read: {error}")


class RedisBackend:
    wants_tokens = False

    def __init__(self, address: RedisAddress, layout: LayoutName, ttl_seconds: int = 0) -> None:
        self.address, self.layout = address, layout
        self._object_bytes = HEADER_BYTES + layout.block_bytes
        self._window = max(1, BYTES_IN_FLIGHT // self._object_bytes)
        self._expiry = (b"EX", str(ttl_seconds).encode()) if ttl_seconds else ()
        self._counters = Counters()
        # Unused connections. Appending to a deque and popping from it are atomic.
        self._idle: deque[Connection] = deque()

    def identify(self, identity: bytes) -> None:
        self.layout = replace(self.layout, identity=identity)

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        done = 0
        while done < len(keys):
            there = self._present(keys[done : done + KEYS_PER_QUESTION], deadline, done)
            if not all(there):
                return done + there.index(False)
            done += len(there)
        return done

    def _present(self, keys: Sequence[bytes], deadline: Deadline, done: int) -> list[bool]:
        """Whether the server has an object of the full length, for each key."""

        def ask(connection: Connection) -> list[bool]:
            connection.send([b"".join(command(b"STRLEN", self._name(key)) for key in keys)])
            return [line == b":%d" % self._object_bytes for line in connection.read_lines(len(keys))]

        return self._on_a_connection(ask, deadline, lambda: done)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        reading = _RedisRead(self, keys, into, deadline)
        try:
            return self._on_a_connection(reading.run, deadline, lambda: reading.done)
        finally:
            self._counters.add("hits", reading.done)
            self._counters.add("misses", len(keys) - reading.done)
            self._counters.add("bytes_read", reading.done * self._object_bytes)
            if reading.damaged is not None:
                self._remove_damaged(reading.damaged, deadline)

    def _remove_damaged(self, key: bytes, deadline: Deadline) -> None:
        self._counters.add("corrupt")

        def remove(connection: Connection) -> None:
            connection.send([command(b"UNLINK", self._name(key))])
            connection.read_lines(1)

        try:
            self._on_a_connection(remove, deadline, lambda: 0)
        except StorageFailed:
            return  # the object stays, and is found damaged again

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        done = 0
        pairs = list(zip(keys, blocks, strict=True))
        while done < len(pairs):
            batch = pairs[done : done + self._window]
            there = self._present([key for key, _ in batch], deadline, done)
            missing = [pair for pair, is_there in zip(batch, there, strict=True) if not is_there]
            if missing:
                self._store(missing, deadline, done)
            self._counters.add("present", len(batch) - len(missing))
            self._counters.add("stored", len(missing))
            self._counters.add("bytes_written", len(missing) * self._object_bytes)
            done += len(batch)
        return done

    def _store(self, batch: Sequence[tuple[bytes, memoryview]], deadline: Deadline, done: int) -> None:
        parts: list[Buffer] = []
        words = 3 + len(self._expiry)
        for key, block in batch:
            name = self._name(key)
            begin = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (words, len(name), name, HEADER_BYTES + block.nbytes)
            end = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in self._expiry)
            parts += [begin + seal(key, self.layout, block), block, b"\r\n" + end]

        def store(connection: Connection) -> None:
            connection.send(parts)
            connection.read_lines(len(batch))

        self._on_a_connection(store, deadline, lambda: done)

    def _name(self, key: bytes) -> bytes:
        return NAMES + self.layout.object_name(key).encode()

    def _on_a_connection(self, work: Callable[[Connection], Answer], deadline: Deadline, done: Callable[[], int]) -> Answer:
        """Run `work` on a connection, and once more on another if that one was dropped: a server may drop idle connections."""
        while True:
            connection, was_idle = None, False
            try:
                connection, was_idle = self._idle_or_new(deadline)
                connection.arm(deadline)
                answer = work(connection)
            except StorageFailed as failed:
                if connection is not None:
                    connection.close()
                raise StorageFailed(failed.reason, str(failed), done())
            except TimeoutError:
                if connection is not None:
                    connection.close()
                raise StorageFailed("timeout", f"Redis at {self.address!r} took too long", done())
            except OSError as error:
                if connection is not None:
                    connection.close()
                    if was_idle:
                        continue
                raise StorageFailed("unreachable", f"Redis at {self.address!r}: {error}", done())
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            self._release(connection)
            return answer

    def _idle_or_new(self, deadline: Deadline) -> tuple[Connection, bool]:
        """A connection, and whether it was idle, so that the server may have closed it."""
        try:
            return self._idle.pop(), True
        except IndexError:
            return Connection(self.address, deadline), False

    def _release(self, connection: Connection) -> None:
        if connection.in_step and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    def counters(self) -> dict[str, int]:
        return self._counters.totals()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _RedisRead:
    """The state of one `get`, which continues on a second connection if the first one is dead."""

    def __init__(self, backend: RedisBackend, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline) -> None:
        self._backend, self._keys, self._into, self._deadline = backend, keys, into, deadline
        # A reply is: the expected first line in two parts (_begin, _rest), header, payload, and CR LF (_end).
        self._usual = b"$%d\r\n" % backend._object_bytes
        self._begin = memoryview(bytearray(5))  # no reply is shorter; a missing object is $-1 CR LF
        self._rest = memoryview(bytearray(len(self._usual) - 5))
        self._header, self._end = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(2))
        self.done = 0
        "Number of leading objects that were read completely and verified."
        self.damaged: bytes | None = None
        "Key of the object that was damaged or of another length."

    def run(self, connection: Connection) -> int:
        window, asked = self._backend._window, self.done
        while self.done < len(self._keys):
            if asked < len(self._keys) and asked - self.done <= window // 2:
                upto = min(len(self._keys), self.done + window)
                connection.send([b"".join(command(b"GET", self._backend._name(key)) for key in self._keys[asked:upto])])
                asked = upto
            connection.arm(self._deadline)
            if not self._one(connection):
                # Remaining replies are not needed: the connection is closed instead.
                connection.in_step = connection.in_step and asked == self.done + 1
                break
            self.done += 1
        return self.done

    def _one(self, connection: Connection) -> bool:
        """Read the next reply. True: it was the object, complete and verified."""
        key, block = self._keys[self.done], self._into[self.done]
        connection.receive([self._begin])
        if self._begin != self._usual[:5]:
            return self._no_object(connection, key)
        connection.receive([self._rest])
        if self._rest != self._usual[5:]:
            self.damaged, connection.in_step = key, False  # an object of another length
            return False
        connection.receive([self._header, block, self._end])
        if bytes(self._end) != b"\r\n":
            raise connection.unexpected(bytes(self._end))
        if fault_of(self._header, key, self._backend.layout, block):
            self.damaged = key
            return False
        return True

    def _no_object(self, connection: Connection, key: bytes) -> bool:
        if bytes(self._begin) == b"$-1\r\n":
            return False
        line = connection.read_rest_of_line(bytes(self._begin))
        if line.startswith(WRONG_TYPE):
            self.damaged = key
        elif re.match(rb"\$[0-9]+(\r|$)", line):  # another length; a short object may be in the bytes read
            self.damaged, connection.in_step = key, False
        else:
            raise connection.error(line) if line.startswith(b"-") else connection.unexpected(line)
        return False
