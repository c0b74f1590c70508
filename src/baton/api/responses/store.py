"""Answers that were kept, for previous_response_id and GET: in this process, bounded in number and bytes.

Room is taken from the tenant that holds the most bytes, the oldest first: no tenant can push out the answers of another that
holds less. What fell out is a 404, as if it had never been kept. Kept are bytes, so what is counted is what is held.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import orjson

from baton.api.errors import to_json
from baton.api.limits import Limits


class Stored:
    __slots__ = ("_conversation", "response")

    def __init__(self, response: bytes, conversation: bytes) -> None:
        self.response = response
        "The answer, as JSON."
        self._conversation = conversation

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Its messages up to and with the answer."""
        messages: list[dict[str, Any]] = orjson.loads(self._conversation)
        return messages

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self._conversation)


class ResponseStore:
    def __init__(self, limits: Limits) -> None:
        self._entries_max = limits.stored_responses
        self._bytes_max = limits.stored_response_bytes
        self._shares: dict[bytes, OrderedDict[str, Stored]] = {}
        self._bytes_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return sum(len(share) for share in self._shares.values())

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes_of.values())

    def put(self, tenant: bytes, name: str, response: dict[str, Any], conversation: list[dict[str, Any]]) -> None:
        """One that is larger than all of the room is not kept."""
        stored = Stored(to_json(response), to_json(conversation))
        if stored.size_bytes > self._bytes_max:
            return
        self._shares.setdefault(tenant, OrderedDict())[name] = stored
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + stored.size_bytes
        while self.size_bytes > self._bytes_max or len(self) > self._entries_max:
            largest = max(self._bytes_of, key=lambda each: self._bytes_of[each])
            self.drop(largest, next(iter(self._shares[largest])))

    def get(self, tenant: bytes, name: str) -> Stored | None:
        """A tenant sees its own alone."""
        share = self._shares.get(tenant)
        found = share.get(name) if share is not None else None
        if share is not None and found is not None:
            share.move_to_end(name)
        return found

    def drop(self, tenant: bytes, name: str) -> bool:
        """Whether it was there."""
        share = self._shares.get(tenant)
        found = share.pop(name, None) if share is not None else None
        if share is None or found is None:
            return False
        self._bytes_of[tenant] -= found.size_bytes
        if not share:
            del self._shares[tenant], self._bytes_of[tenant]
        return True
