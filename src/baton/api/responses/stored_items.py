"""Items of answers that were kept: by id, for a request that refers to one, and as the list of what an answer was given.

GET /v1/responses/{id}/input_items      all that was said before the answer, as items, the newest first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from baton.api.errors import ApiError, to_json
from baton.api.responses.output_items import Item, OutputItems, response_of
from baton.api.responses.store import ResponseStore, Stored
from baton.text.parsers.base import ToolCallDelta


class StoredItems:
    """Of one tenant, for one request. Thirty bytes refer to megabytes: what it reads and what it refers to counts as if it had
    been sent, so a request grows by one body's worth at most."""

    def __init__(self, store: ResponseStore, tenant: bytes, bytes_max: int) -> None:
        self._store = store
        self._tenant = tenant
        self._bytes_max = self._bytes_left = bytes_max
        self._read: dict[str, dict[str, tuple[Item, int]]] = {}
        "By response: its items, each with its size."

    def item(self, item_id: str) -> Item | None:
        """Raises ApiError where it is too much."""
        response_id = response_of(item_id)
        if response_id not in self._read:
            stored = self._store.get(self._tenant, response_id)
            if stored is None:
                return None
            self._spend(len(stored.response))
            output: list[Item] = orjson.loads(stored.response)["output"]
            self._read[response_id] = {item["id"]: (item, len(to_json(item))) for item in output}
        found = self._read[response_id].get(item_id)
        if found is None:
            return None
        self._spend(found[1])
        return found[0]

    def _spend(self, size_bytes: int) -> None:
        self._bytes_left -= size_bytes
        if self._bytes_left < 0:
            message = f"input refers to more than {self._bytes_max} bytes of answers that are kept here: refer to fewer"
            raise ApiError(413, message, param="input", code="body_too_large")


def input_items(response_id: str, stored: Stored) -> list[Item]:
    """In the order in which they were said. Their ids are theirs in this list alone."""
    made = OutputItems(f"{response_id}in")
    items: list[Item] = []
    for message in stored.conversation[:-1]:  # the last one is the answer
        items += list(_items(message, made, len(items)))
    return items


def _items(message: dict[str, Any], made: OutputItems, place: int) -> Iterator[Item]:
    if message["role"] == "tool":
        result = {"call_id": message["tool_call_id"], "output": message["content"], "status": "completed"}
        yield {"id": made.message(place, "", [])["id"], "type": "function_call_output", **result}
        return
    if message["role"] != "assistant":
        text = message["content"]
        content = [{"type": "input_text", "text": text}] if isinstance(text, str) else text
        yield {**made.message(place, "", []), "role": message["role"], "content": content}
        return
    if thought := message.get("reasoning_content"):
        yield made.reasoning(place, thought)
        place += 1
    if message["content"]:
        text = message["content"]
        yield made.message(place, text, []) if isinstance(text, str) else {**made.message(place, "", []), "content": text}
        place += 1
    for later, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield made.call(place + later, ToolCallDelta(0, call["id"], function["name"], function["arguments"]))
