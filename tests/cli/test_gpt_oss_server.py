"""Chats with a tiny random gpt-oss through a real server: channels are parsed, calls and formats are held to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openai
import pytest
from command_rig import serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.text.harmony_marks import CHANNEL, END, MARKS, START

sys.path.append(str(Path(__file__).parent.parent / "models"))
tiny_models = pytest.importorskip("tiny_models", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <|channel|>analysis #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"], "additionalProperties": False}
QUESTION = [{"role": "user", "content": "How is it?"}]


def write_gpt_oss(folder: Path) -> None:
    """A token per byte, and gpt-oss' own marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    marks = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    sizes = {"vocab_size": 280, "max_position_embeddings": 2048, "eos_token_id": marks.get("<|return|>", marks[END])}
    with pytest.MonkeyPatch.context() as patch:
        family, settings = tiny_models.CASES["gpt-oss"]
        patch.setitem(tiny_models.CASES, "gpt-oss-server", (family, {**settings, **sizes}))
        tiny_models.oracle_model("gpt-oss-server").save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt-oss"
    write_gpt_oss(folder)
    with serving(folder, "--served-model-name", "tiny", "--quantization", "none") as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_answer_is_parsed_and_begins_and_ends_are_no_text(client, seed):
    fields = {"model": "tiny", "messages": QUESTION, "max_tokens": 48, "temperature": 1.0, "seed": seed}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason in ("stop", "length")
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields) if chunk.choices]
    content = "".join(part.delta.content or "" for part in parts)
    assert (content, parts[-1].finish_reason) == (whole.message.content or "", whole.finish_reason)
    assert not [mark for mark in (CHANNEL, START, END) if mark in content], ascii(content)


def test_a_call_that_is_required_is_a_call(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=400, temperature=0,
        extra_body={"reasoning_effort": "low"},
    ).choices[0]  # fmt: skip
    if answer.finish_reason == "length":  # a random model may think until its tokens are spent
        assert not answer.message.tool_calls
        return
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9


def test_an_answer_in_a_format_is_in_that_format(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=400, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}},
    ).choices[0]  # fmt: skip
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content)["warm"], bool)
    else:
        assert answer.finish_reason == "length"
