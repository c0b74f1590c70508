"""System and developer messages reach the model, whatever its template does with them."""

from __future__ import annotations

import pytest

from baton.text.chat_messages import plain_messages
from baton.text.chat_template import CHATML, ChatTemplate, TemplateFailed, TemplateStopped
from baton.text.helper import HelperCrash
from baton.text.system_messages import fitted
from baton.text.template_process import TemplateProcess

QWEN = """{%- if messages[0].role == 'system' %}<sys>{{ messages[0].content }}</sys>
{%- else %}<sys>You are Qwen.</sys>{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{%- endif %}{%- endfor %}"""
"As Qwen2.5's: a role that it does not know is left out without a word."
FIRST_ONLY = """{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('System must be at the beginning.') }}{% endif %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"""
"As Mistral's and newer ones of Qwen."
CHANNELS = """{%- if messages[0].role in ('developer', 'system') %}<developer>{{ messages[0].content }}</developer>{% endif %}
{%- for message in messages %}{% if message.role in ('user', 'assistant') %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endif %}{% endfor %}"""
"As gpt-oss': only the first message may be one, the others are left out."
DEVELOPER, SYSTEM, USER = ({"role": role, "content": f"{role.upper()} SAYS"} for role in ("developer", "system", "user"))


def rendered(source: str, *messages: dict) -> str:
    template = ChatTemplate(source)
    return template.render(fitted(plain_messages(messages, messages_max=99), template, with_tools=False))


@pytest.mark.parametrize("source", [QWEN, FIRST_ONLY, CHANNELS, CHATML])
@pytest.mark.parametrize(
    "chat",
    [
        (DEVELOPER, USER),
        (SYSTEM, DEVELOPER, USER),
        (SYSTEM, DEVELOPER, DEVELOPER, USER),
        (DEVELOPER, SYSTEM, USER),
        (SYSTEM, USER, SYSTEM),
        (USER, SYSTEM),
        (USER, DEVELOPER, USER),
        (SYSTEM, SYSTEM, USER),
    ],
)
def test_none_is_dropped(source, chat):
    prompt = rendered(source, *chat)
    for message in (DEVELOPER, SYSTEM, USER):
        assert prompt.count(message["content"]) == sum(each is message for each in chat), prompt


def test_a_developer_is_the_system_where_the_template_does_not_know_the_word():
    assert "<sys>DEVELOPER SAYS</sys>" in rendered(QWEN, DEVELOPER, USER)
    assert "<sys>SYSTEM SAYS\n\nDEVELOPER SAYS</sys>" in rendered(QWEN, SYSTEM, DEVELOPER, USER)
    assert "<|im_start|>system\nDEVELOPER SAYS" in rendered(CHATML, DEVELOPER, USER), "not a role that no model has seen"


def test_a_template_that_knows_the_word_gets_it():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# system, developer #}"
    assert rendered(source, DEVELOPER, USER) == "<developer>DEVELOPER SAYS<user>USER SAYS"


def test_what_a_template_takes_is_left_where_it_is():
    assert rendered(QWEN, SYSTEM, USER, SYSTEM).endswith("<user>USER SAYS</user><system>SYSTEM SAYS</system>")
    assert rendered(CHATML, SYSTEM, SYSTEM, USER).count("<|im_start|>system") == 2


def test_a_template_is_tried_once_and_only_where_there_is_something_to_find_out():
    template = ChatTemplate(QWEN)
    fitted(plain_messages([SYSTEM, USER], messages_max=9), template, with_tools=False)
    assert template.found_out == {}
    for _ in range(2):
        fitted(plain_messages([SYSTEM, USER, SYSTEM], messages_max=9), template, with_tools=False)
    assert len(template.found_out) == 1


def test_a_template_that_has_no_system_messages_still_says_so():
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
    with pytest.raises(TemplateFailed, match="no system role"):
        rendered(refuses, USER, DEVELOPER)


class KilledProcess(TemplateProcess):
    """The one that renders is killed while `killed` is set, and its successor too."""

    killed = False

    def render(self, request, seconds, reply_bytes_max):
        if self.killed:
            raise HelperCrash
        return super().render(request, seconds, reply_bytes_max)


def test_a_killed_process_says_nothing_about_the_template():
    process = KilledProcess()
    template = ChatTemplate(QWEN, process=process)
    chat = plain_messages([SYSTEM, USER, SYSTEM], messages_max=9)
    process.killed = True
    with pytest.raises(TemplateStopped):
        fitted(chat, template, with_tools=False)
    process.killed = False
    assert fitted(chat, template, with_tools=False) == chat, "as if the process had not been killed"
    process.close()
