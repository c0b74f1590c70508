"""`Idempotency-Key`: a retried request is generated once.

While the first request runs, a second with the same key gets 409; afterwards it gets the same bytes. An answer other than 200
is forgotten, so that a retry may succeed. The store is bounded; evicted answers are generated again. Eviction starts with the
tenant that holds the most, so no tenant evicts the answers of one that holds less.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.api.errors import ApiError
from baton.api.limits import Limits


@dataclass(slots=True, eq=False)
class Remembered:
    tenant: bytes
    request_digest: bytes
    answer: bytes | None = None
    "The stored answer. None while the request runs."
    media_type: str = ""


@dataclass(slots=True, eq=False)
class _Share:
    """Entries of one tenant, oldest first."""

    entries: OrderedDict[str, Remembered] = field(default_factory=OrderedDict)
    finished: int = 0
    answer_bytes: int = 0


class Recording:
    """Records a stream while it is sent. The record is dropped if it, or all records together, grow too large."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._bytes = 0
        self._parts: list[bytes] | None = []

    def add(self, part: bytes) -> None:
        if self._parts is None:
            return
        if not self._store.may_record(self._bytes, len(part)):
            self.close()
            return
        self._store.recording_bytes += len(part)
        self._bytes += len(part)
        self._parts.append(part)

    @property
    def content(self) -> bytes | None:
        return None if self._parts is None else b"".join(self._parts)

    def close(self) -> None:
        """Releases the bytes. Idempotent."""
        self._store.recording_bytes -= self._bytes
        self._bytes, self._parts = 0, None


class IdempotencyStore:
    def __init__(self, limits: Limits) -> None:
        self._bytes_max = limits.idempotency_bytes
        self._entries_max = limits.idempotency_entries
        self._answer_bytes_max = limits.idempotency_answer_bytes
        self._shares: dict[bytes, _Share] = {}
        self.recording_bytes = 0
        "Total bytes of the records of running streams."

    def recording(self) -> Recording:
        return Recording(self)

    def may_record(self, recorded_bytes: int, more_bytes: int) -> bool:
        fits_alone = recorded_bytes + more_bytes <= self._answer_bytes_max
        return fits_alone and self.recording_bytes + more_bytes <= self._bytes_max

    def begin(self, tenant: bytes, key: str, route: str, body: bytes) -> Remembered:
        """Returns the finished entry, or a new one (without answer) that the caller must finish or drop."""
        digest = hashlib.sha256(route.encode() + b"\0" + body).digest()
        entries = self._shares.setdefault(tenant, _Share()).entries
        known = entries.get(key)
        if known is None:
            entry = entries[key] = Remembered(tenant, digest)
            return entry
        if known.request_digest != digest:
            raise ApiError(409, "this Idempotency-Key was used for a different request", code="idempotency_key_reused")
        if known.answer is None:
            raise ApiError(409, "a request with this Idempotency-Key is still running", code="idempotency_key_in_use")
        entries.move_to_end(key)
        return known

    def finish(self, entry: Remembered, answer: bytes, media_type: str) -> None:
        """Stores the answer, unless it is too large: then the caller drops the entry."""
        if len(answer) > self._answer_bytes_max:
            return
        entry.answer, entry.media_type = answer, media_type
        share = self._shares[entry.tenant]
        share.answer_bytes += len(answer)
        share.finished += 1
        self._evict()

    def drop(self, tenant: bytes, key: str, entry: Remembered) -> None:
        """Forgets an entry without answer. Idempotent, also if a retry has begun in between."""
        share = self._shares.get(tenant)
        if share is not None and share.entries.get(key) is entry:
            self._remove(tenant, key)

    def _remove(self, tenant: bytes, key: str) -> None:
        share = self._shares[tenant]
        entry = share.entries.pop(key)
        if entry.answer is not None:
            share.answer_bytes -= len(entry.answer)
            share.finished -= 1
        if not share.entries:
            del self._shares[tenant]

    def _evict(self) -> None:
        """Evicts finished answers. Running entries stay: they are needed, and bounded by the number of open requests."""
        while sum(share.answer_bytes for share in self._shares.values()) > self._bytes_max:
            self._evict_oldest(max(self._shares, key=lambda tenant: self._shares[tenant].answer_bytes))
        while sum(len(share.entries) for share in self._shares.values()) > self._entries_max:
            tenant = max(self._shares, key=lambda tenant: self._shares[tenant].finished)
            if not self._shares[tenant].finished:
                return
            self._evict_oldest(tenant)

    def _evict_oldest(self, tenant: bytes) -> None:
        entries = self._shares[tenant].entries
        self._remove(tenant, next(key for key, entry in entries.items() if entry.answer is not None))
