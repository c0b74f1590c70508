"""Whatever the grammar of required calls allows, the parser of the same style reads as calls."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from baton.text.parsers.call_grammar import calls_grammar
from baton.text.parsers.calls import CallsParser
from baton.text.parsers.styles import CALL_STYLES

llguidance = pytest.importorskip("llguidance")

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
TOKENS = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in MARKS] + [b"<end>"]
END = len(TOKENS) - 1
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rom \"}"]}, "days": {"$ref": "#/$defs/Days"}, "now": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 0, "maximum": 99, "x-of-somebody": 1}},
}  # fmt: skip
TOOLS = {"weather": WEATHER, "a.b-c": {"properties": {"x": {"type": "null"}}, "additionalProperties": False}}
SPECIAL = {mark: 256 + place for place, mark in enumerate(MARKS)}


class _Tokens:
    bos_token_id = None
    tokens = TOKENS
    eos_token_id = END

    def __init__(self, special: bool) -> None:
        self.special_token_ids = [*SPECIAL.values(), END] if special else [END]

    def __call__(self, text):
        return []


def matcher(style: str, *, parallel: bool = True, special: bool = False, **more):
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(special)), n_vocab=len(TOKENS), eos_token=END)
    text = calls_grammar(CALL_STYLES[style], TOOLS, parallel=parallel, special=SPECIAL if special else {}, **more)
    made = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes(made, text: str) -> bool:
    tokens = list(text.encode())
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


def wander(made, dice: random.Random) -> str:
    """Any text that the grammar allows; it ends where it may with some luck."""
    text = b""
    for _ in range(2000):
        words = np.zeros((len(TOKENS) + 31) // 32, np.uint32)
        made.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()
        if END in allowed and (dice.random() < 0.6 or len(allowed) == 1):
            return text.decode()
        token = dice.choice([each for each in allowed if each != END])
        assert made.consume_token(token)
        text += TOKENS[token]
    raise AssertionError("it does not end")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("style", CALL_STYLES)
def test_what_it_allows_is_read_as_calls(style, parallel, special):
    dice = random.Random(f"{style} {parallel} {special}")
    for _ in range(6):
        text = wander(matcher(style, parallel=parallel, special=special), dice)
        parser = CallsParser(CALL_STYLES[style], tuple(TOOLS), calls_max=999)
        parts = [*parser.feed(text), *parser.flush()]
        assert all(hasattr(part, "arguments") for part in parts), text
        names = [part.name for part in parts if part.name is not None]
        assert names
        assert len(names) == 1 or parallel
        for index, name in enumerate(names):
            arguments = json.loads("".join(part.arguments for part in parts if part.index == index))
            assert set(arguments) <= set(TOOLS[name]["properties"])
            assert name != "weather" or arguments["city"] in WEATHER["properties"]["city"]["enum"]


CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("llama3_json", CALL.replace("arguments", "parameters")),
        ("json", CALL),
    ],
)
def test_it_allows_what_models_write(style, text):
    assert takes(matcher(style), text)
    assert not takes(matcher(style), text.replace("Oslo", "Nowhere"))
    assert not takes(matcher(style), text.replace("weather", "nobody"))
    assert not takes(matcher(style), "It is cold.")


def test_or_an_answer_in_its_format():
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
    for text in ('{"a": 5}', f"<tool_call>\n{CALL}\n</tool_call>"):
        assert takes(matcher("hermes", or_answer=schema), text)
    assert not takes(matcher("hermes", or_answer=schema), '{"b": 5}')
