"""Fields of Ollama's requests: the tables (translate.py defines the rules), and the translation of a body to OpenAI's."""

from __future__ import annotations

import json
from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import expect, shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody, CompletionBody
from baton.api.translate import ONE_ANSWER, Table, errors_named_by, format_named, harmless, own, refused, same, translated

OPTIONS: Final[Table] = {
    "num_predict": same("max_tokens", "tokens of the answer; -1 and -2: up to the context"),
    "temperature": same("temperature"),
    "top_k": same("top_k"),
    "top_p": same("top_p"),
    "min_p": same("min_p"),
    "seed": same("seed"),
    "stop": same("stop"),
    "repeat_penalty": same("repetition_penalty", "over all tokens so far, not over the last repeat_last_n"),
    "presence_penalty": same("presence_penalty"),
    "frequency_penalty": same("frequency_penalty"),
    "typical_p": refused(1),
    "tfs_z": refused(1),
    "mirostat": refused(0),
    "mirostat_tau": harmless("of mirostat"),
    "mirostat_eta": harmless("of mirostat"),
    "repeat_last_n": harmless("repeat_penalty is over all tokens"),
    "penalize_newline": harmless("a penalty is for all tokens alike"),
    "num_ctx": harmless("the context is the server's: --max-model-len"),
    "num_keep": harmless("a prompt is never cut"),
    "num_batch": harmless("a setting of the server"),
    "num_gpu": harmless("a setting of the server"),
    "main_gpu": harmless("a setting of the server"),
    "num_thread": harmless("a setting of the server"),
    "numa": harmless("a setting of the server"),
    "low_vram": harmless("a setting of the server"),
    "f16_kv": harmless("a setting of the server"),
    "use_mmap": harmless("a setting of the server"),
    "use_mlock": harmless("a setting of the server"),
    "logits_all": harmless("a setting of the server"),
    "vocab_only": harmless("a setting of the server"),
    "embedding_only": harmless("a setting of the server"),
}
"""Fields of the object `options`."""

_BOTH: Final[Table] = {
    **ONE_ANSWER,
    "model": own("the served name, also with :latest", "string"),
    "stream": own("true where it is not given", "boolean"),
    "options": own("settings, see below", "object"),
    "format": own('"json", or a JSON schema', "string or object"),
    "think": same("think", "reasoning: true, false, or how much of it"),
    "keep_alive": harmless("the model stays"),
    "stream_options": refused(),
}
CHAT: Final[Table] = {
    **_BOTH,
    "messages": own("role, content, tool_calls, tool_name, thinking", "array"),
    "tools": own("functions that the model may call", "array"),
    "logprobs": refused(False, about="log-probabilities come from /v1/chat/completions"),
    "top_logprobs": refused(0, about="log-probabilities come from /v1/chat/completions"),
}
GENERATE: Final[Table] = {
    **_BOTH,
    "prompt": own("a text", "string"),
    "system": own("a message before it", "string"),
    "raw": own("the prompt goes to the model without the chat template", "boolean"),
    "template": refused("", about="templates come from the model or the operator, never from a request"),
    "context": refused([], about="send the history as messages to /api/chat"),
    "suffix": own("what follows the gap that the model fills in after the prompt", "string"),
    "images": refused([], about="only text is supported"),
    "logprobs": refused(False, about="log-probabilities come from /v1/completions"),
    "top_logprobs": refused(0, about="log-probabilities come from /v1/completions"),
}


def chat_body(front: Front, body: dict[str, Any]) -> ChatBody | None:
    """Translates a body of /api/chat. None for an empty list of messages: such a request only asks whether the model is
    loaded."""
    messages: list[Any] = expect(list, body.get("messages") or [], "messages")
    asked = _common(front, body, CHAT)
    if body.get("tools"):
        asked["tools"] = body["tools"]
    asked["messages"] = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return _read_chat(front, asked) if messages else None


def generate_body(front: Front, body: dict[str, Any]) -> ChatBody | CompletionBody | None:
    """Translates a body of /api/generate. None if there is no prompt."""
    prompt, system, suffix = (expect(str, body.get(name) or "", name) for name in ("prompt", "system", "suffix"))
    raw = expect(bool, body.get("raw") or False, "raw")
    asked = _common(front, body, GENERATE)
    if not prompt:
        return None
    if suffix:
        if system or raw:
            raise bad("suffix is not used with system or raw: the prompt is the text before the gap", "suffix")
        asked["suffix"], raw = suffix, True
    if raw:
        if system:
            raise bad("system is not used where raw is true: write it into the prompt", "system")
        asked.setdefault("max_tokens", -1)
        with errors_named_by((OPTIONS, "options.")):
            return format_named(front.schema.completion({**asked, "prompt": prompt}), "format")
    spoken = [{"role": "system", "content": system}] if system else []
    return _read_chat(front, {**asked, "messages": [*spoken, {"role": "user", "content": prompt}]})


def model_name(front: Front, name: Any) -> Any:
    """The served name of a model: clients write name:latest for name."""
    if isinstance(name, str) and not front.model.is_called(name) and name.endswith(":latest"):
        return name.removesuffix(":latest")
    return name


def _read_chat(front: Front, asked: dict[str, Any]) -> ChatBody:
    with errors_named_by((OPTIONS, "options.")):
        return format_named(front.schema.chat(asked), "format")


def _common(front: Front, body: dict[str, Any], table: Table) -> dict[str, Any]:
    options: dict[str, Any] = expect(dict, body.get("options") or {}, "options")
    asked = {**translated(body, table), **translated(options, OPTIONS, "options.")}
    asked["model"] = model_name(front, body.get("model"))
    asked["stream"] = True if body.get("stream") is None else body["stream"]
    if asked.get("max_tokens") == -2:  # same as -1: up to the context
        asked["max_tokens"] = -1
    if body.get("format") not in (None, ""):
        asked["response_format"] = _response_format(body["format"])
    front.schema.require_model(asked["model"])
    return asked


def _response_format(value: Any) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise bad(f'format must be "json" or a JSON schema, not {shown(value)}', "format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _message(message: Any, place: str) -> Any:
    """A message in OpenAI's form. Other errors in it are reported by the check of all chats (text/chat_messages.py)."""
    if not isinstance(message, dict):
        return message
    if message.get("images"):
        raise bad(f"{place}.images is not supported: only text is", "messages", code="unsupported")
    plain = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        plain["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        plain["name"] = message["tool_name"]
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return plain


def _call(call: Any, index: int) -> Any:
    """A tool call in OpenAI's form: Ollama's have no id, and their arguments are an object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = json.dumps(function["arguments"])
    return {"id": f"call{index:05d}", "type": "function", **call, "function": function}
