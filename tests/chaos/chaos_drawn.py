"""Valid requests with every sampling feature in odd combinations, in every dialect, and their answers in a form that two
servers must agree on: neither ids nor times, and streams put together, however many tokens a delta had.

Stop strings, biases and bad words are pieces of an answer that the model gives, so that they matter; stop strings often end
inside a delta of several tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaos_model import make_model
from chaos_server import Reply

SPECIAL = ("<|start|>", "<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
THINK, THOUGHT = 2, 3
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
WORDS = ("abc ", "hello ", "the cat ", "12 ", "x=y; ", "é", "日本", "\n", "foo(bar) ")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
SCHEMAS: tuple[Any, ...] = (
    WEATHER, {"enum": ["alpha", "alphabet", "beta"]}, {"type": "string", "maxLength": 6},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, "required": ["a"]},
)  # fmt: skip
REGEXES = ("(abc|abd){1,4}x", "[a-c]{3}-[0-9]{2,4}", "yes please|yes thank you|no")
GRAMMARS = ('root ::= "yes, I am" | "no, I am not" | "no, never"', 'root ::= item+\nitem ::= "foo " | "bar; "')
CITY = {"type": "object", "properties": {"city": {"enum": ["a", "bcd"]}}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "f", "parameters": CITY}
CALL_TOKENS = 70
"""Length of an answer that calls, which takes about 60."""
OLLAMA = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
OLLAMA_OPTIONS = ("temperature", "seed", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty", *OLLAMA)

Request = tuple[str, dict[str, Any]]
Answer = tuple[str, list[int]]
"""Text and tokens of an answer that the model gives."""


def make_drawn_model(folder: Path) -> Path:
    return make_model(folder, special=SPECIAL, template=TEMPLATE)


class Drawn:
    def __init__(self, dice: random.Random, answers: list[Answer]) -> None:
        self.dice = dice
        self._answers = answers

    def some(self, chance: float, **fields: Any) -> dict[str, Any]:
        return fields if self.dice.random() < chance else {}

    def one(self, *values: Any) -> Any:
        return self.dice.choice(values)

    def request(self) -> Request:
        dialects = (self.completion, self.chat, self.responses, self.messages, self.ollama)
        (dialect,) = self.dice.choices(dialects, (5, 5, 2, 2, 2))
        path, body = dialect()
        most = next((body[name] for name in ("max_tokens", "max_output_tokens") if name in body), 100)
        body["min_tokens"] = min(body.get("min_tokens", 0), most)
        return path, body | self.some(0.1, **{"speculative.n_max": self.one(0, 1, 3, 30)})

    # Parts of bodies

    def text(self) -> str:
        part = "".join(self.dice.choices(WORDS, k=self.dice.randint(1, 8)))
        return (part * self.one(1, 1, 2, 3))[:40]

    def chat_of(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text()[:30]}]

    def length(self) -> int:
        return self.one(1, 1, 2, 3, 5, 8, 16, 24, 40, 60)

    def sampling(self) -> dict[str, Any]:
        dice, drawn = self.dice, self.dice.random() < 0.5
        body = {"temperature": self.one(0.2, 0.5, 0.8, 1.0) if drawn else 0, "seed": dice.randrange(2**31)}
        body |= self.some(0.3, top_p=self.one(0.3, 0.8, 1.0)) | self.some(0.3, top_k=self.one(1, 3, 20, -1))
        body |= self.some(0.3, min_p=self.one(0, 0.05, 0.3)) | self.some(0.2, repetition_penalty=self.one(1.1, 1.5, 0.8))
        body |= self.some(0.2, presence_penalty=self.one(-1, 0.5, 2))
        return body | self.some(0.2, frequency_penalty=self.one(-1.5, 0.5, 1)) | self.pieces()

    def pieces(self) -> dict[str, Any]:
        """Fields that name pieces of the model's answers."""
        dice, (text, tokens) = self.dice, self.dice.choice(self._answers)
        begin = dice.randrange(len(text))
        cuts = [text[at : at + self.one(1, 2, 3, 5, 8)] for at in (begin, dice.randrange(len(text)))]
        words = [cut for cut in cuts if cut.strip() and "\ufffd" not in cut]
        bias = {str(token): self.one(-100, -2, 1.5, 5) for token in dice.sample(tokens, 3)}
        found = self.some(0.2, stop_token_ids=dice.sample(tokens, 2)) | self.some(0.2, logit_bias=bias)
        found |= self.some(0.1, bad_words_token_ids=[dice.choice(tokens)]) | self.some(0.2, min_tokens=self.one(1, 3, 10))
        if words:
            found |= self.some(0.4, stop=words) | self.some(0.2, bad_words=words[:1])
        return found | self.some(0.3, include_stop_str_in_output=True)

    def form(self) -> dict[str, Any]:
        """Structured output."""
        schema, regex = self.dice.choice(SCHEMAS), self.dice.choice(REGEXES)
        json_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        return self.dice.choice(
            (
                {"response_format": json_schema},
                {"response_format": {"type": "json_object"}},
                {"guided_json": schema},
                {"guided_regex": regex},
                {"structured_outputs": {"regex": regex}},
                {"guided_choice": ["alpha", "alphabet", "be"]},
                {"guided_grammar": self.dice.choice(GRAMMARS)},
            )
        )

    def several(self) -> dict[str, Any]:
        """Fields of OpenAI's two older endpoints."""
        pattern = {"max_pattern_size": self.one(1, 3, 6), "min_count": self.one(2, 3)}
        body = self.some(0.3, n=self.one(2, 3)) | self.some(0.6, return_token_ids=True) | self.some(0.4, ignore_eos=True)
        body |= self.some(0.1, repetition_detection=pattern) | self.some(0.1, skip_special_tokens=False)
        if self.dice.random() < 0.4:
            return body | {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.some(0.2, prompt_logprobs=self.one(0, 1, 3))

    def thinking(self) -> dict[str, Any]:
        """Reasoning, which the model begins only with a bias."""
        body = {"enable_thinking": self.dice.random() < 0.8} | self.some(0.6, thinking_token_budget=self.one(0, 1, 3, 8))
        return body | self.some(0.7, logit_bias={str(THINK): 6, str(THOUGHT): self.one(1, 3)})

    # Bodies

    def completion(self) -> Request:
        body = {"prompt": self.text(), "max_tokens": self.length(), **self.sampling(), **self.several()}
        body |= self.some(0.2, echo=True) | self.some(0.5, logprobs=self.one(0, 1, 5, 20))
        body |= self.some(0.1, prompt=[self.text(), self.text()]) | self.some(0.25, **self.form())
        return "/v1/completions", body

    def chat(self) -> Request:
        body = {"messages": self.chat_of(), "max_tokens": self.length() + 20, **self.sampling(), **self.several()}
        body |= self.some(0.5, logprobs=True, top_logprobs=self.one(0, 1, 20)) | self.some(0.3, **self.thinking())
        tools = {"tools": [{"type": "function", "function": TOOL}], "max_tokens": CALL_TOKENS}
        tools |= {"tool_choice": self.one("auto", "required", "required", "none")}
        return "/v1/chat/completions", body | (self.some(0.5, **tools) or self.some(0.4, **self.form()))

    def responses(self) -> Request:
        body = {"input": self.text(), "max_output_tokens": self.length() + 10, "store": False, **self.sampling()}
        body |= {"stream": self.dice.random() < 0.6} | self.some(0.3, include=["message.output_text.logprobs"], top_logprobs=2)
        form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": WEATHER, "strict": True}}}
        tools = {"tools": [{"type": "function", **TOOL}], "max_output_tokens": CALL_TOKENS}
        tools |= {"tool_choice": self.one("auto", "required", "required")}
        return "/v1/responses", body | (self.some(0.3, **tools) or self.some(0.3, **form) or self.some(0.3, **self.thinking()))

    def messages(self) -> Request:
        body = {"model": "tiny", "messages": self.chat_of(), "max_tokens": self.length() + 10, **self.sampling()}
        body |= {"stream": self.dice.random() < 0.6}
        tools = {"tools": [{"name": "f", "input_schema": CITY}], "max_tokens": CALL_TOKENS}
        tools |= {"tool_choice": {"type": self.one("auto", "any", "any")}}
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}, "logit_bias": {str(THINK): 6, str(THOUGHT): 3}}
        return "/v1/messages", body | self.some(0.3, **tools) | self.some(0.3, **thinking)

    def ollama(self) -> Request:
        body = {"model": "tiny", "stream": self.dice.random() < 0.6, "max_tokens": self.length() + 10, **self.sampling()}
        options = {OLLAMA.get(name, name): body.pop(name) for name in OLLAMA_OPTIONS if name in body}
        body |= {"options": options} | self.some(0.3, format=WEATHER)
        if self.dice.random() < 0.5:
            return "/api/generate", body | {"prompt": self.text()}
        return "/api/chat", body | {"messages": self.chat_of()} | self.some(0.3, think=True)


# Answers

VOLATILE = (
    "id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "system_fingerprint", "sequence_number",
    "obfuscation", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration",
    # Where the prompt was found, and what drafts and other requests had to do with it:
    "prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens",
    "baton_preemptions", "accepted_prediction_tokens", "rejected_prediction_tokens",
)  # fmt: skip
WHOLE = ("finish_reason", "stop_reason", "ended_by", "done_reason", "object", "model", "role", "type", "usage")
"""Fields of a stream's parts that are not put together: the last one counts."""


def comparable(body: dict[str, Any], path: str, reply: Reply) -> Any:
    streamed = body.get("stream", False) and reply.status == 200
    if not streamed:
        return reply.status, _lasting(reply.json)
    if path.startswith("/api/"):
        return _joined(_lasting(json.loads(line)) for line in reply.content.splitlines() if line)
    events = [_lasting(event) for event in reply.events]
    if path in ("/v1/responses", "/v1/messages"):
        deltas: dict[str, Any] = {}
        for event in events:
            if "delta" in event and event["type"] != "message_delta":
                name = f"{event['type']} {event.get('output_index')} {event.get('index')}"
                deltas[name] = _join(deltas.get(name), event["delta"])
        return deltas, [event for event in events if "delta" not in event or event["type"] == "message_delta"]
    return _joined(events), reply.complete


def usages(value: Any) -> Iterable[dict[str, Any]]:
    """All objects that count tokens."""
    if isinstance(value, dict):
        if isinstance(value.get("usage"), dict):
            yield value["usage"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from usages(each)


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _lasting(each) for name, each in value.items() if name not in VOLATILE and each is not None}
        return {name: each for name, each in kept.items() if not (name.endswith("_tokens_details") and not each)}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def _joined(parts: Iterable[Any]) -> Any:
    found: Any = None
    for part in parts:
        found = _join(found, part)
    return found


def _join(before: Any, after: Any) -> Any:
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, dict) and isinstance(after, dict):
        join: Callable[[str, Any], Any] = lambda name, each: each if name in WHOLE else _join(before.get(name), each)  # noqa: E731
        return before | {name: join(name, each) for name, each in after.items()}
    if isinstance(before, list) and isinstance(after, list):
        if not all(isinstance(each, dict) and "index" in each for each in before + after):
            return before + after
        by_index: dict[int, Any] = {}
        for each in before + after:
            rest = {name: value for name, value in each.items() if name != "index"}
            by_index[each["index"]] = _join(by_index.get(each["index"]), rest)
        return [{"index": index, **by_index[index]} for index in sorted(by_index)]
    return before + after if isinstance(before, str) and isinstance(after, str) else after
