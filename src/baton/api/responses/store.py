"""Stored answers, for previous_response_id and GET: in this process, bounded in number and bytes. And their items.

Eviction starts with the tenant that holds the most bytes, its oldest answer first, so no tenant evicts the
answers of one that holds less. An evicted answer is a 404. Answers are stored as bytes, so the count is exact.

resp_ID     msg_ID00  rs_ID00  fc_ID01      an item's id contains the response's id and its place in the output: it is found by
            that alone (`response_of`), without a table of items
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from baton.api.errors import ApiError, to_json
from baton.api.limits import Limits
from baton.text.parsers.base import Content, Part, ToolCallDelta

Item = dict[str, Any]
RESPONSE_PREFIX: Final = "resp_"
_PLACE_CHARS: Final = 2


class Stored:
    __slots__ = ("_conversation", "response")

    def __init__(self, response: bytes, conversation: bytes) -> None:
        self.response = response
        "The answer, as JSON."
        self._conversation = conversation

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Messages up to and including the answer."""
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
        """Stores the answer. An answer larger than the whole store is not stored."""
        stored = Stored(to_json(response), to_json(conversation))
        if stored.size_bytes > self._bytes_max:
            return
        self._shares.setdefault(tenant, OrderedDict())[name] = stored
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + stored.size_bytes
        while self.size_bytes > self._bytes_max or len(self) > self._entries_max:
            largest = max(self._bytes_of, key=lambda each: self._bytes_of[each])
            self.drop(largest, next(iter(self._shares[largest])))

    def get(self, tenant: bytes, name: str) -> Stored | None:
        """A tenant sees only its own answers."""
        share = self._shares.get(tenant)
        found = share.get(name) if share is not None else None
        if share is not None and found is not None:
            share.move_to_end(name)
        return found

    def drop(self, tenant: bytes, name: str) -> bool:
        """Returns whether the answer was stored."""
        share = self._shares.get(tenant)
        found = share.pop(name, None) if share is not None else None
        if share is None or found is None:
            return False
        self._bytes_of[tenant] -= found.size_bytes
        if not share:
            del self._shares[tenant], self._bytes_of[tenant]
        return True


def response_of(item_id: str) -> str:
    """The id of the response that the item belongs to. For any other text: an id that does not exist."""
    return RESPONSE_PREFIX + item_id.partition("_")[2][:-_PLACE_CHARS]


class OutputItems:
    """Builds the items of one response."""

    def __init__(
        self, response_id: str, *, summary: bool = False, namespaces: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        """`summary`: the client requested one. The reasoning is then sent as its own summary: some clients read nothing else.
        `namespaces`: namespace and name, by the tool name that the model sees."""
        self._id = response_id.removeprefix(RESPONSE_PREFIX)
        self._namespaces = namespaces or {}
        self.summary = summary

    def item(self, place: int, part: Part, logprobs: list[Any], *, cut: bool) -> Item:
        """An item of the output. `cut`: the answer ended early, and this is its last item."""
        if isinstance(part, ToolCallDelta):
            return self.call(place, part, "completed" if part.is_whole else "incomplete")
        status = "incomplete" if cut else "completed"
        if isinstance(part, Content):
            return self.message(place, part.text, logprobs, status)
        return self.reasoning(place, part.text, status)

    def message(self, place: int, text: str, logprobs: list[Any], status: str = "completed") -> Item:
        content = [] if status == "in_progress" else [text_part(text, logprobs)]
        return {"id": self._named("msg", place), "type": "message", "role": "assistant", "status": status, "content": content}

    def reasoning(self, place: int, text: str, status: str = "completed") -> Item:
        parts = [] if status == "in_progress" else [self.reasoning_part(text)]
        written = {"summary": parts, "content": []} if self.summary else {"summary": [], "content": parts}
        return {"id": self._named("rs", place), "type": "reasoning", "status": status, **written}

    def call(self, place: int, call: ToolCallDelta, status: str = "completed") -> Item:
        """Clients run a completed call, so a call with partial arguments must not be completed."""
        named = {"call_id": call.id, **self.tool_name(call), "arguments": "" if status == "in_progress" else call.arguments}
        return {"id": self._named("fc", place), "type": "function_call", "status": status, **named}

    def tool_name(self, call: ToolCallDelta) -> Item:
        """Name and namespace of the call's tool."""
        namespace, name = self._namespaces.get(call.name or "", (None, call.name))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}

    def reasoning_part(self, text: str) -> Item:
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}

    def _named(self, kind: str, place: int) -> str:
        return f"{kind}_{self._id}{place:0{_PLACE_CHARS}x}"


def text_part(text: str, logprobs: list[Any]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class StoredItems:
    """Stored items of one tenant for one request. A reference of thirty bytes may mean megabytes, so items that are read or
    referred to count as if they had been sent: a request grows by at most one body."""

    def __init__(self, store: ResponseStore, tenant: bytes, bytes_max: int) -> None:
        self._store = store
        self._tenant = tenant
        self._bytes_max = self._bytes_left = bytes_max
        self._read: dict[str, dict[str, tuple[Item, int]]] = {}
        "Items of a response, each with its size, by response."

    def item(self, item_id: str) -> Item | None:
        """The item, or None. Raises ApiError if the request grows too large."""
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
    """Input items in the order of the conversation. Their ids are valid in this list only."""
    made = OutputItems(f"{response_id}in")
    items: list[Item] = []
    for message in stored.conversation[:-1]:  # the last one is the answer
        items += list(_items(message, made, len(items)))
    return items


def _items(message: dict[str, Any], made: OutputItems, place: int) -> Iterator[Item]:
    """Yields a message of a conversation as items. `place`: number of its first item."""
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
