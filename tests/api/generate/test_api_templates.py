"""A model's template that does not end: its chat gets a 400, everybody else goes on."""

from __future__ import annotations

import threading
from dataclasses import replace

import httpx
import pytest
from api_fakes import serving

from baton.text.chat_template import ChatTemplate, TemplateLimits
from baton.text.template_process import TemplateProcess

LOOPS_ON_REQUEST = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def looping(text):
    process = TemplateProcess()
    template = ChatTemplate(LOOPS_ON_REQUEST, limits=TemplateLimits(render_seconds_max=2.0), process=process)
    with serving(replace(text, chat_template=template)) as server:
        yield server
    process.close()


def chat(content: str) -> dict:
    return {"model": "smol", "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_does_not_end_holds_up_nobody(looping, route):
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(looping.url + route, json=chat("loop"), timeout=60))

    hostile = threading.Thread(target=ask)
    hostile.start()
    meanwhile = 0
    with httpx.Client(timeout=60) as client:
        while hostile.is_alive():
            body = {"model": "smol", "prompt": "Once", "max_tokens": 1}
            assert client.post(looping.url + "/v1/completions", json=body).status_code == 200
            assert client.get(looping.url + "/health").status_code == 200
            meanwhile += hostile.is_alive()
        assert meanwhile > 1
        assert answers[0].status_code == 400
        assert "more than 2 s" in answers[0].json()["error"]["message"]
        assert client.post(looping.url + route, json=chat("Hi")).status_code == 200


def test_a_small_chat_does_not_wait_for_the_threads_of_large_requests(text):
    """Both threads for large texts are taken; a small chat is rendered all the same."""
    with serving(text) as server:
        front = server.app.state.front
        opened = threading.Event()
        taken = [front._large_threads.submit(opened.wait, 60) for _ in range(front.config.text_threads)]
        try:
            answer = httpx.post(server.url + "/v1/chat/completions", json=chat("Hi"), timeout=20)
            assert answer.status_code == 200
            assert not any(one.done() for one in taken)
        finally:
            opened.set()
