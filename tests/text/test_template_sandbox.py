"""Templates that would run for ever or fill the memory are stopped. Without the bound most of these never end."""

from __future__ import annotations

import threading

import pytest

from baton.errors import InvalidConfig
from baton.text.chat_template import CHATML, ChatTemplate, TemplateFailed, TemplateLimits

HI = [{"role": "user", "content": "Hi"}]
FAST = TemplateLimits(units_max=200_000, prompt_chars_max=1_000_000)

ENDLESS = {
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop that only tests": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop that goes on": "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "growing by +": "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "growing by ~": "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "growing list": "{% set n = namespace(s=[1]) %}{% for i in range(99999) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "growing by join": (
        "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = [n.s, n.s] | join(n.s) %}{% endfor %}"
    ),
    "growing by replace": (
        "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}"
    ),
    "growing by method": (
        "{% set n = namespace(s='ab') %}{% for i in range(99999) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}"
    ),
    "long string": "{{ 'a' * 10000000000 }}",
    "long list": "{% set x = [0] * 10000000000 %}",
    "huge number": "{{ 10 ** 100000000 }}",
    "huge product": "{% set n = namespace(s=9) %}{% for i in range(99999) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "wide % by argument": "{{ '%*d' % (1000000000, 1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide format by argument": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "padding": "{{ messages[0].content.ljust(1000000000) }}",
    "padding filter": "{{ messages[0].content | center(1000000000) }}",
    "indent filter": "{{ messages[0].content | indent(1000000000, true) }}",
    "wide json": "{{ messages | tojson(indent=1000000000) }}",
    "batch": "{{ messages | batch(1000000000, 'x') | list }}",
    "macro recursion": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "loop recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "literal output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "output into a block": "{% set x %}{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "output into a macro": "{% macro m() %}"
    + "x" * 1000
    + "{% endmacro %}{% for a in range(99999) %}{% set x = m() %}{% endfor %}",
    "own meter": "{% set meter = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lorem": "{{ lipsum(100000) }}",
    "namespace internals": "{% set n = namespace(_Namespace__attrs=1) %}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_is_stopped(name):
    try:
        template = ChatTemplate(ENDLESS[name], limits=FAST)
    except InvalidConfig:
        return  # a constant expression: found when the template was read
    with pytest.raises(TemplateFailed) as caught:
        template.render(HI)
    assert len(str(caught.value)) < 300


def test_a_budget_is_for_one_rendering():
    template = ChatTemplate("{% for a in range(1000) %}{% endfor %}ok", limits=TemplateLimits(units_max=3000))
    for _ in range(10):
        assert template.render(HI) == "ok"


def test_threads_have_budgets_of_their_own():
    template = ChatTemplate(CHATML, limits=TemplateLimits(units_max=30_000))
    results: list[int] = []

    def work():
        results.extend(len(template.render(HI * 1000)) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert len(set(results)) == 1


def test_a_prompt_that_is_too_long_is_refused():
    template = ChatTemplate(CHATML, limits=TemplateLimits(prompt_chars_max=1000))
    with pytest.raises(TemplateFailed, match="1000 characters"):
        template.render([{"role": "user", "content": "x" * 1001}])
    with pytest.raises(TemplateFailed, match="1000 characters"):
        template.render(HI * 100)


def test_a_large_honest_chat_is_rendered():
    content = "word " * 1_000_000
    assert len(ChatTemplate(CHATML).render([{"role": "user", "content": content}])) > 5_000_000
