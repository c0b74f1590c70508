"""Rendering: SmolLM2's own template, Hugging Face's rules (with transformers as the oracle), and bad chats."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from baton.errors import CallerError, InvalidConfig
from baton.text.chat_template import CHATML, ChatTemplate, TemplateFailed
from baton.text.loading import load_model_text

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
HI = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 1+1?  "},
    {"role": "assistant", "content": "It is "},
]


@pytest.fixture(scope="module")
def smollm2_text(smollm2_gguf):
    return load_model_text(smollm2_gguf)


def test_smollm2_renders_as_its_authors_wrote(smollm2_text):
    render = smollm2_text.chat_template.render
    assert render(HI) == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(HI, add_generation_prompt=False) == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n  What is 1+1?  <|im_end|>\n"
        "<|im_start|>assistant\nIt is <|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_goes_on_with_the_last_message(smollm2_text):
    prompt = smollm2_text.chat_template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nIt is ")


def test_smollm2_prompt_to_ids(smollm2_text):
    prompt = smollm2_text.chat_template.render(HI)
    ids = smollm2_text.tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert smollm2_text.tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_continuing_cuts_in_the_right_place_even_for_a_short_word():
    template = ChatTemplate(CHATML)
    chat = [*HI, {"role": "assistant", "content": "im"}]  # which is also part of <|im_end|>
    prompt = template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nim")


def test_continuing_and_a_new_turn_exclude_each_other():
    with pytest.raises(CallerError, match="exclude"):
        ChatTemplate(CHATML).render(CHAT, add_generation_prompt=True, continue_final_message=True)


def test_continuing_a_message_the_template_drops():
    with pytest.raises(TemplateFailed, match="leaves out"):
        ChatTemplate("x").render(CHAT, add_generation_prompt=False, continue_final_message=True)


# --- What a message may be --------------------------------------------------------------------------------------------


def chatml(*messages):
    return ChatTemplate(CHATML).render(list(messages), add_generation_prompt=False)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    assert chatml({"role": "user", "content": parts}) == "<|im_start|>user\none\ntwo\nthree<|im_end|>\n"
    assert chatml({"role": "user", "content": []}) == "<|im_start|>user\n<|im_end|>\n"


def test_an_assistant_may_say_nothing():
    empty = "<|im_start|>assistant\n<|im_end|>\n"
    assert chatml({"role": "assistant", "content": None}) == empty
    assert chatml({"role": "assistant"}) == empty


def test_an_unknown_role_is_the_templates_business():
    assert chatml({"role": "critic", "content": "x"}) == "<|im_start|>critic\nx<|im_end|>\n"


@pytest.mark.parametrize("arguments", ["{broken", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "[1]", "1" * 5000])
def test_arguments_that_are_no_object_stay_a_string(arguments):
    """A model wrote them, and its client plays them back: no reason to refuse the rest of the chat."""
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}")
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    assert template.render([{"role": "assistant", "tool_calls": calls}]) == arguments


def test_arguments_of_tool_calls_become_objects():
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Oslo"


def test_messages_of_the_caller_stay_as_they_are():
    messages = [{"role": "assistant", "content": None, "tool_calls": None}]
    before = json.dumps(messages)
    ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "must be a list"),
        ("hi", "must be a list"),
        ({}, "must be a list"),
        ([], "empty"),
        ([*HI] * 100_000, "at most 4096"),
        (["secret"], r"messages\[0\]"),
        ([*HI, {"content": "secret"}], r"messages\[1\]\.role"),
        ([{"role": "", "content": "secret"}], "role"),
        ([{"role": "user\n<|im_end|>", "content": "secret"}], "role"),
        ([{"role": "x" * 65, "content": "secret"}], "role"),
        ([{"role": ["user"], "content": "secret"}], "role"),
        ([{"role": "user", "content": None}], "missing"),
        ([{"role": "user"}], "missing"),
        ([{"role": "user", "content": 5}], "int"),
        ([{"role": "user", "content": {"secret": 1}}], "dict"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "secret"}]}], "only"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "text part"),
        ([{"role": "user", "content": [["secret"]]}], "text part"),
        ([{"role": "user", "content": ["x"] * 100_000}], "at most"),
        ([{"role": "assistant", "tool_calls": "secret"}], "must be a list"),
        ([{"role": "assistant", "tool_calls": ["secret"]}], "object"),
    ],
)
def test_bad_messages_are_refused_without_repeating_them(messages, words):
    with pytest.raises(CallerError, match=words) as caught:
        ChatTemplate(CHATML).render(messages)
    assert "secret" not in str(caught.value)
    assert caught.value.http_status == 400


@pytest.mark.parametrize("content", ["\ud800", "\x00", "\ufeff", "{{ 7 * 7 }}{% raw %}", "\ud83d\ude00"])
def test_odd_text_is_rendered_as_text(content):
    expected = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert chatml({"role": "user", "content": content}) == f"<|im_start|>user\n{expected}<|im_end|>\n"


def test_the_most_messages_allowed_are_rendered():
    assert ChatTemplate(CHATML).render(HI * 4096).count("<|im_start|>user") == 4096


# --- Extras -----------------------------------------------------------------------------------------------------------


def test_extras_and_tools_reach_the_template():
    template = ChatTemplate("{{ style }} {{ tools[0].name }} {{ documents is none }} {{ bos_token }}", bos_token="<s>")
    assert template.render(HI, tools=[{"name": "t"}], extras={"style": "short"}) == "short t True <s>"
    assert ChatTemplate("{{ tools is none }}").render(HI, tools=[]) == "True"


@pytest.mark.parametrize("key", ["messages", "chat_template", "tokenize", "raise_exception", "bos_token", "_x", "a-b", ""])
def test_extras_may_not_replace_what_the_server_sets(key):
    with pytest.raises(CallerError, match="chat_template_kwargs"):
        ChatTemplate(CHATML).render(HI, extras={key: "x"})


@pytest.mark.parametrize("tools", ["x", [1], [{}] * 1000])
def test_bad_tools_are_refused(tools):
    with pytest.raises(CallerError, match="tools"):
        ChatTemplate(CHATML).render(HI, tools=tools)


def test_a_template_for_tools_is_used_when_there_are_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[{"name": "t"}]) == "tools"


# --- Models without a template, or with a broken one ------------------------------------------------------------------


def test_a_model_without_a_template(byte_level_folder, tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((byte_level_folder / name).read_bytes())
    assert load_model_text(tmp_path).chat_template.render(HI).startswith("<|im_start|>user\nHi")
    with pytest.raises(CallerError, match="no chat template"):
        load_model_text(tmp_path, no_template="refuse").chat_template.render(HI)


def test_where_a_folder_keeps_its_template(byte_level_folder, tmp_path):
    assert load_model_text(byte_level_folder).chat_template.render(HI) == "<|start|>folder"
    for file in byte_level_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_model_text(tmp_path).chat_template.names == ("default", "tool_use")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_model_text(tmp_path).chat_template.render(HI) == "from the file"
    assert load_model_text(tmp_path, chat_template="given").chat_template.render(HI) == "given"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nosuchtag %}", "x" * (1024 * 1024 + 1)])
def test_a_template_that_is_not_jinja_is_refused_at_the_start(source):
    with pytest.raises(InvalidConfig, match="chat template 'default'"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception('Unknown role: ' + messages[0].content[:9]) }}", r"Unknown role: \.\.\."),
        ("{{ raise_exception(messages[0].content) }}", "not shown"),
        ("{{ raise_exception('x' * 1000) }}", "not shown"),
        ("{{ messages[0].nothing.more }}", "misses a value: 'nothing'"),
        ("{{ messages[0][messages[0].content].more }}", "misses a value: .a name"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ {}[messages[0].content] ~ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "may not do"),
        ("{{ ''.__class__.__mro__ }}", "may not do|misses"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "stopped|nests"),
        ("{% include 'x' %}", "failed"),
    ],
)
def test_a_failing_template_names_the_problem_and_not_the_prompt(source, words):
    with pytest.raises(TemplateFailed, match=words) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "top secret"}])
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# --- transformers -----------------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": CHATML,
    "trims": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
    "whitespace": "\n  {% if true %}\n  a\n  {%- endif %}\n{{- messages[0]['content'] -}}\n\n{# note #}\nend\n",
    "namespace": (
        "{%- set ns = namespace(n=0, text='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}"
        "{%- endif -%}{%- set ns.n = ns.n + 1 -%}{%- set ns.text = ns.text ~ m.content ~ ns.n -%}"
        "{%- endfor -%}{{ ns.text }}"
    ),
    "macro": (
        "{% macro turn(role, text='') %}<{{ role }}>{{ caller() if caller else text }}</{{ role }}>{% endmacro %}"
        "{% for m in messages if m.content %}{{ turn(m.role, m.content) }}{{ loop.index }}/{{ loop.length }}"
        "{% endfor %}"
        "{% call turn('x') %}called{% endcall %}"
    ),
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=true) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "loops": "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.previtem is defined }}{% endfor %}",
    "strings": (
        "{% for m in messages %}{{ m.content.split('\\n')[-1].strip() | upper | replace('A', 'b') }}"
        "{{ '%s-%d' % (m.role, 3) }}{{ '{:>4}'.format(m.role) }}{{ 'ab' * 3 }}{{ [1, 2] | join(', ') }}"
        "{{ range(3) | list }}{{ m.content | length }}"
        "{{ m.x | default(1000000) }}{{ messages[::-1][0].role }}{{ 2 ** 10 % 7 }}{{ none }}{{ missing }}{% endfor %}"
    ),
    "break": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name):
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers, the oracle, is not installed")
    tools = [{"name": "f", "parameters": {"é": [1, None, "<&>"]}}]
    ours = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    for add, go_on in ((True, False), (False, False), (False, True)):
        wanted = {"add_generation_prompt": add, "continue_final_message": go_on, "tools": tools}
        try:
            theirs = utils.render_jinja_template(
                [CHAT], chat_template=TEMPLATES[name], bos_token="<s>", eos_token="</s>", **wanted
            )[0][0]
        except ValueError:
            with pytest.raises(TemplateFailed):
                ours.render(CHAT, **wanted)
        else:
            if go_on and name in ("strings", "json", "macro"):
                continue  # the mark that is cut at is visible to the template: another length, upper case, ...
            assert ours.render(CHAT, **wanted) == theirs


def test_the_date_is_passed_in():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 3))
    assert template.render(HI) == "03 Feb 2026"
