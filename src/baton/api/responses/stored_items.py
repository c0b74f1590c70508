"""Items of answers that were kept: by id, for a request that refers to one, and as the list of what an answer was given.

GET /v1/responses/{id}/input_items      all that was said before the answer, as items, the newest first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from baton.api.responses.output_items import Item, OutputItems, response_of
from baton.api.responses.store import ResponseStore, Stored
from baton.text.parsers.base import ToolCallDelta


class StoredItems:
    """Of one tenant."""

    def __init__(self, store: ResponseStore, tenant: bytes) -> None:
        self._store = store
        self._tenant = tenant

    def item(self, item_id: str) -> Item | None:
        stored = self._store.get(self._tenant, response_of(item_id))
        output: list[Item] = [] if stored is None else orjson.loads(stored.response)["output"]
        return next((item for item in output if item["id"] == item_id), None)


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
