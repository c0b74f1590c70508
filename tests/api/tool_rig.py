"""A server whose template speaks of tools and thoughts, as Qwen's does, and tools to call."""

from __future__ import annotations

import json

from baton.text.chat_template import ChatTemplate
from baton.text.loading import ModelText

QWEN = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

THINKS = QWEN.replace(
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)
"Opens a thought whatever it is told, as DeepSeek's does."


def with_template(text: ModelText, source: str) -> ModelText:
    bos, eos = (text.tokenizer.token_text(token) for token in (text.tokenizer.bos_id, text.tokenizer.eos_ids[0]))
    return ModelText(text.tokenizer, ChatTemplate(source, bos_token=bos, eos_token=eos))


def function(name: str, **properties: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"What {name} does.", "parameters": parameters}}


TOOLS = [function("weather", city={"type": "string"}), function("time_in", zone={"type": "string"})]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt_of(server) -> str:
    """What the engine was asked last."""
    return server.app.state.front.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)


def events_of(http, url: str, path: str, body: dict) -> list[dict]:
    """The events of a streamed answer, in any dialect."""
    with http.stream("POST", url + path, json={"model": "smol", **body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in lines]
