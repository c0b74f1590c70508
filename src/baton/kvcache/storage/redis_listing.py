"""Lists and removes the objects of a Redis. Nothing is read that would renew an object: GET and STRLEN would."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import time
from typing import Final

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.listing import Advance, StoredObject
from baton.kvcache.storage.redis_store import NAMES
from baton.kvcache.storage.resp import Connection, RedisAddress, Reply, command

SECONDS_MAX: Final = 30.0
"""Seconds for one batch."""
BATCH: Final = 500
PRECISION_SECONDS: Final = 3.0
"""Precision in seconds of a server's times of last use."""
_NAME: Final = re.compile(NAMES + rb"([0-9a-f]{64})-([0-9a-f]{16}-r\d{1,5})")


class RedisListing:
    def __init__(self, address: RedisAddress) -> None:
        self.place = f"Redis at {address!r}"
        try:
            self._connection = Connection(address, Deadline.after(SECONDS_MAX))
        except StorageFailed as failed:
            raise InvalidConfig(str(failed)) from None
        except OSError as error:
            raise InvalidConfig(f"{self.place} cannot be reached: {error}") from None

    def objects(self, advance: Advance) -> Iterator[StoredObject]:
        """Objects of the store. A name that the server reports twice, as SCAN may, is listed once."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, names = self._scanned(cursor)
            fresh = [name for name in dict.fromkeys(names) if name not in seen and _NAME.fullmatch(name)]
            seen.update(fresh)
            yield from self._described(fresh)
            advance(len(seen), 0)
            if cursor == b"0":
                return

    def _scanned(self, cursor: bytes) -> tuple[bytes, list[bytes]]:
        (reply,) = self._request([command(b"SCAN", cursor, b"MATCH", NAMES + b"*", b"COUNT", str(BATCH).encode())])
        if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[0], bytes) or not isinstance(reply[1], list):
            raise InvalidConfig(f"{self.place} gave an answer to SCAN that does not fit")
        return reply[0], [name for name in reply[1] if isinstance(name, bytes)]

    def _described(self, names: Sequence[bytes]) -> Iterator[StoredObject]:
        """Facts about each object that still exists. An LFU policy of the server knows no times of last use."""
        now, questions = time(), ((b"OBJECT", b"IDLETIME"), (b"MEMORY", b"USAGE"))
        replies = iter(self._request([command(*question, name) for name in names for question in questions]))
        for name, idle, nbytes in zip(names, replies, replies, strict=False):
            match = _NAME.fullmatch(name)
            if match is not None and isinstance(nbytes, int):
                used_at = now - idle if isinstance(idle, int) else None
                yield StoredObject(name.decode(), match[1].decode(), match[2].decode(), nbytes, used_at)

    def remove(self, found: Iterable[StoredObject], advance: Advance) -> int:
        removed = done = 0
        waiting = iter(found)
        while batch := list(islice(waiting, BATCH)):
            listed = {one.place: one.used_at for one in batch}
            still = [one for one in self._described([name.encode() for name in listed]) if _unused(one, listed[one.place])]
            if still:
                (count,) = self._request([command(b"UNLINK", *(one.place.encode() for one in still))])
                removed += count if isinstance(count, int) else 0
            done += len(batch)
            advance(done, 0)
        return removed

    def _request(self, commands: Sequence[bytes]) -> list[Reply]:
        """The replies to these commands, in order. An error reply is a StorageFailed among them."""
        if not commands:
            return []
        try:
            self._connection.arm(Deadline.after(SECONDS_MAX))
            self._connection.send([b"".join(commands)])
            return self._connection.read_replies(len(commands))
        except StorageFailed as failed:
            raise InvalidConfig(str(failed)) from None
        except OSError as error:
            raise InvalidConfig(f"{self.place} was lost: {error or type(error).__name__}") from None


def _unused(now: StoredObject, listed_at: float | None) -> bool:
    """Whether the object was not used since it was listed."""
    return now.used_at is None or listed_at is None or now.used_at <= listed_at + PRECISION_SECONDS
