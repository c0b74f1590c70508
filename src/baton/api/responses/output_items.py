"""The items of an answer of /v1/responses, and their ids.

resp_ID     msg_ID00  rs_ID00  fc_ID01      an item's id has the response's in it, and its place in the output: it is found
                                            again by that alone (`response_of`), without a table of items
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from baton.text.parsers.base import Content, Part, ToolCallDelta

Item = dict[str, Any]

RESPONSE_PREFIX: Final = "resp_"
_PLACE_CHARS: Final = 2


def response_of(item_id: str) -> str:
    """The id of the response that made the item. Of any other text: the id of none."""
    return RESPONSE_PREFIX + item_id.partition("_")[2][:-_PLACE_CHARS]


class OutputItems:
    """Makes the items of one response."""

    def __init__(
        self, response_id: str, *, summary: bool = False, namespaces: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        """`summary`: one was asked for. A thought is its own summary then: some clients look nowhere else for it.
        `namespaces`: by the name of a tool that the model sees, namespace and name, which clients want apart."""
        self._id = response_id.removeprefix(RESPONSE_PREFIX)
        self._namespaces = namespaces or {}
        self.summary = summary

    def item(self, place: int, part: Part, logprobs: list[Any], *, cut: bool) -> Item:
        """`cut`: the answer ended early, and this is its last item."""
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
        told = {"summary": parts, "content": []} if self.summary else {"summary": [], "content": parts}
        return {"id": self._named("rs", place), "type": "reasoning", "status": status, **told}

    def call(self, place: int, call: ToolCallDelta, status: str = "completed") -> Item:
        """Clients run a call whose item is completed, so one without all of its arguments must not be."""
        named = {"call_id": call.id, **self.called(call), "arguments": "" if status == "in_progress" else call.arguments}
        return {"id": self._named("fc", place), "type": "function_call", "status": status, **named}

    def called(self, call: ToolCallDelta) -> Item:
        """The name of its tool."""
        namespace, name = self._namespaces.get(call.name or "", (None, call.name))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}

    def reasoning_part(self, text: str) -> Item:
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}

    def _named(self, kind: str, place: int) -> str:
        return f"{kind}_{self._id}{place:0{_PLACE_CHARS}x}"


def text_part(text: str, logprobs: list[Any]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
