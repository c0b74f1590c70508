"""`Idempotency-Key`: a retried request is generated once.

While the first one runs, a second with the same key gets 409; once it is answered, the same bytes again. An answer
that was not 200 is forgotten, so that a retry can do better. The store is bounded; what falls out of it is generated again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from baton.api.errors import ApiError
from baton.api.limits import Limits


@dataclass(slots=True, eq=False)
class Remembered:
    request_digest: bytes
    answer: bytes | None = None
    "None while it runs."
    media_type: str = ""


class IdempotencyStore:
    def __init__(self, limits: Limits) -> None:
        self._bytes_max = limits.idempotency_bytes
        self._entries_max = limits.idempotency_entries
        self._bytes = 0
        self._entries: OrderedDict[tuple[bytes, str], Remembered] = OrderedDict()

    def begin(self, tenant: bytes, key: str, body: bytes) -> Remembered:
        """The finished answer, or a new entry (without answer) for the caller to finish or drop."""
        digest = hashlib.sha256(body).digest()
        known = self._entries.get((tenant, key))
        if known is None:
            entry = self._entries[tenant, key] = Remembered(digest)
            return entry
        if known.request_digest != digest:
            raise ApiError(409, "this Idempotency-Key was used for a different request", code="idempotency_key_reused")
        if known.answer is None:
            raise ApiError(409, "a request with this Idempotency-Key is still running", code="idempotency_key_in_use")
        self._entries.move_to_end((tenant, key))
        return known

    def finish(self, entry: Remembered, answer: bytes, media_type: str) -> None:
        entry.answer, entry.media_type = answer, media_type
        self._bytes += len(answer)
        self._evict()

    def drop(self, tenant: bytes, key: str, entry: Remembered) -> None:
        """Forgets an entry that will have no answer. Twice is harmless, also where a retry has begun in between."""
        if self._entries.get((tenant, key)) is entry:
            del self._entries[tenant, key]

    def _evict(self) -> None:
        """The oldest finished answers go; running ones are needed, and bounded by the number of streams."""
        for place, entry in list(self._entries.items()):
            if self._bytes <= self._bytes_max and len(self._entries) <= self._entries_max:
                return
            if entry.answer is not None:
                self._bytes -= len(entry.answer)
                del self._entries[place]
