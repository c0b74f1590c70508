"""Templates that would run for ever, fill the memory or reach into Python are stopped, and the next chat is rendered.

Each ends in one of three ways: the sandbox refuses it, memory ends, or the child is killed at the deadline. Which one is not
what matters here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from template_rig import HI, NEVER_ENDS, render_children

from baton.errors import InvalidConfig
from baton.text.chat_template import CHATML, ChatTemplate, TemplateFailed, TemplateLimits
from baton.text.template_process import TemplateProcess

MEMORY = 192 * 1024 * 1024
FAST = TemplateLimits(render_seconds_max=0.2, prompt_chars_max=1_000_000)
LONG = [{"role": "user", "content": "s" * 100_000}]

HOSTILE = {
    # What a budget that counted calls did not see: one call that walks or makes a lot.
    "formats": "{{ ('{0}' * 20000).format(messages[0].content) | length }}",
    "formats by %": "{{ (('%(a)s' * 20000) % {'a': messages[0].content}) | length }}",
    "joins": "{{ messages[0].content.join(range(20000) | map('string')) | length }}",
    "expands tabs": "{{ ('\\t' * 8000000).expandtabs(messages[0].content | length) | length }}",
    "sums in a loop": NEVER_ENDS,
    "searches in a loop": "{% for a in range(99999) %}{% set x = 'q' in messages[0].content * 100 %}{% endfor %}",
    # Loops.
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop that only tests": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    # Values that grow.
    "growing by +": "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "growing by ~": "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "growing list": "{% set n = namespace(s=[1]) %}{% for i in range(99999) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "growing by join": (
        "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = [n.s, n.s] | join(n.s) %}{% endfor %}"
    ),
    "growing by replace": (
        "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}"
    ),
    "long string": "{{ 'a' * 10000000000 }}",
    "long list": "{% set x = [0] * 10000000000 %}",
    "huge number": "{{ 10 ** 100000000 }}",
    "huge product": "{% set n = namespace(s=9) %}{% for i in range(99999) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "padding": "{{ messages[0].content.ljust(1000000000) }}",
    "indent filter": "{{ messages[0].content | indent(1000000000, true) }}",
    "wide json": "{{ messages | tojson(indent=1000000000) }}",
    "batch": "{{ messages | batch(1000000000, 'x') | list }}",
    "lorem": "{{ lipsum(100000) }}",
    "output into a block": "{% set x %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    # Recursion.
    "macro recursion": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "wide recursion": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "loop recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    # Output.
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "literal output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(MEMORY)
    yield process
    process.close()


@pytest.fixture(scope="module")
def chatml(process: TemplateProcess) -> ChatTemplate:
    return ChatTemplate(CHATML, process=process)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_and_the_next_chat_is_rendered(name, process, chatml):
    before = len(render_children())
    # A constant expression is worked out when the template is compiled: it is refused at the start.
    with pytest.raises((TemplateFailed, InvalidConfig), match=r"chat template ('default' cannot be compiled|)") as caught:
        ChatTemplate(HOSTILE[name], limits=FAST, process=process).render(LONG)
    assert len(str(caught.value)) < 300
    assert caught.value.http_status == 400
    assert chatml.render(HI).startswith("<|im_start|>user\nHi")
    assert len(render_children()) <= max(before, 1)


def test_memory_that_ran_out_is_said(process):
    with pytest.raises(TemplateFailed, match="too much memory"):
        ChatTemplate("{{ messages[0].content * 100000 }}", process=process).render(LONG)


def test_time_that_ran_out_is_said(process):
    with pytest.raises(TemplateFailed, match=r"more than 0\.2 s"):
        ChatTemplate(NEVER_ENDS, limits=FAST, process=process).render(HI)


def test_a_prompt_that_is_too_long_is_refused():
    template = ChatTemplate(CHATML, limits=TemplateLimits(prompt_chars_max=1000))
    with pytest.raises(TemplateFailed, match="1000 characters"):
        template.render([{"role": "user", "content": "x" * 1001}])
    with pytest.raises(TemplateFailed, match="1000 characters"):
        template.render(HI * 100)


@pytest.mark.parametrize("character", ["w", "\u4e16", "\U0001f600"])
def test_the_largest_honest_chat_is_rendered(character):
    content = "word " * 1_600_000 + character
    prompt = ChatTemplate(CHATML).render([{"role": "user", "content": content}])
    assert prompt == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


# --- Ways out of the sandbox ------------------------------------------------------------------------------------------

ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "class as an item": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class of a message": "{{ messages[0].__class__ }}",
    "globals of ours": "{{ raise_exception.__globals__ }}",
    "globals of ours, as an item": "{{ strftime_now['__globals__'] }}",
    "globals of jinja2": "{{ lipsum.__globals__['os'].popen('echo escaped').read() }}",
    "init of a class": "{{ cycler.__init__.__globals__ }}",
    "namespace class": "{{ namespace.__init__.__globals__ }}",
    "namespace internals": "{% set n = namespace(_Namespace__attrs=1) %}escaped",
    "namespace internals, set": "{% set n = namespace() %}{% set n.__class__ = 1 %}escaped",
    "dict class": "{{ dict.__class__ }}{{ dict.fromkeys.__func__ }}",
    "function of a method": "{{ messages.append.__self__ }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "format of an item": "{{ '{0[0].__class__}'.format(messages) }}",
    "format kept": "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "format by filter": "{{ ('{0.__class__}' | attr('format'))('') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format of globals": "{{ '{0.__globals__}'.format(raise_exception) }}",
    "caller": "{% macro m() %}{{ caller.__func__ }}{{ m.__init__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "context": "{{ self.__dict__ }}{{ self._TemplateReference__context.environment }}",
    "loop": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "changes": "{{ messages.append(1) }}{{ messages[0].update({'role': 'x'}) }}escaped",
    "include": "{% include '/etc/passwd' %}escaped",
    "import": "{% import 'os' as os %}escaped",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_does_not_get_out(name, process):
    try:
        prompt = ChatTemplate(ESCAPES[name], process=process).render(HI)
    except TemplateFailed:
        return
    for trace in ("<class", "<function", "<module", "<bound", "<built-in", "__builtins__", "escaped", "root:"):
        assert trace not in prompt
