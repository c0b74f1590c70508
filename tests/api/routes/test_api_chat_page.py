"""The chat page in a real browser."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from api_fakes import MODEL, Script, eventually, says, serving
from chromium import Browser, chromium_path


@pytest.fixture(scope="module")
def browser():
    path = chromium_path()
    if path is None:
        pytest.skip("no chromium here")
    browser = Browser(path)
    yield browser
    browser.close()


def shot(browser: Browser, name: str) -> None:
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        browser.screenshot(f"{folder}/{name}.png")


@pytest.fixture(autouse=True)
def nothing_is_remembered(request, server):
    """Chats and settings stay in the browser, also for the next test."""
    yield
    if "browser" in request.fixturenames:
        request.getfixturevalue("browser").evaluate("localStorage.clear()")


def last(selector: str) -> str:
    return f"[...document.querySelectorAll('{selector}')].at(-1)?.textContent"


def ask(browser: Browser, text: str) -> None:
    browser.evaluate("document.getElementById('input').focus()")
    browser.type(text)
    browser.press_enter()


def choose(browser: Browser, control: str, value: float) -> None:
    """As if somebody moved it."""
    browser.evaluate(
        f"{{ const c = document.getElementById('{control}'); c.value = {value}; c.dispatchEvent(new Event('input')); }}"
    )


def test_a_chat(server, browser, text):
    server.engine.script = Script(
        reply=says(text, "The sky is blue.\n\nBecause of <b>Rayleigh</b>."), delay_seconds=0.01, cached_tokens=16,
        host_tokens=5, storage_tokens=7,
    )  # fmt: skip
    browser.open(server.url + "/")
    browser.until("document.getElementById('model').textContent.includes('smol')")
    shot(browser, "empty")
    ask(browser, "Why is the sky blue?")
    browser.until(last(".assistant .text") + " === 'The sky is blue.Because of <b>Rayleigh</b>.'")
    assert browser.evaluate("document.querySelectorAll('.assistant .text p').length") == 2
    numbers = browser.until("document.getElementById('go').textContent === 'Send' && " + last(".assistant .numbers"))
    assert "tokens/s" in numbers
    assert "first token 0." in numbers
    assert "16 of" in numbers
    assert "cached (5 from host, 7 from storage)" in numbers
    assert browser.evaluate("document.querySelectorAll('.assistant b').length") == 0
    ask(browser, "And at night?")
    browser.until(
        "document.querySelectorAll('.assistant').length === 2 && document.getElementById('go').textContent === 'Send'"
    )
    prompt = text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)
    assert "Why is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky is blue." in prompt
    assert prompt.endswith("And at night?<|im_end|>\n<|im_start|>assistant\n")
    shot(browser, "chat")


def test_stop_button_aborts(server, browser):
    server.engine.script = Script(delay_seconds=0.02)
    browser.open(server.url + "/")
    ask(browser, "Go on for ever")
    browser.until("document.getElementById('go').textContent === 'Stop' && " + last(".assistant .text"))
    browser.evaluate("document.getElementById('go').click()")
    assert eventually(lambda: not server.engine.live, 1.0)
    assert "stopped" in browser.until("document.getElementById('go').textContent === 'Send' && " + last(".assistant .numbers"))


def test_controls_reach_the_engine_and_errors_are_shown(server, browser):
    browser.open(server.url + "/")
    choose(browser, "temperature", 0)
    choose(browser, "max-tokens", 3)
    ask(browser, "Hi")
    browser.until("document.querySelector('.numbers') !== null && document.getElementById('go').textContent === 'Send'")
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 3)
    from baton.protocol.request import Refused

    server.engine.script = Script(refuse=Refused("queue_full", 9, 8))
    ask(browser, "Again")
    assert "the queue holds 8" in browser.until(last(".failure"))


def test_a_temperature_that_nobody_chose_is_the_models(text, browser):
    defaults = {"temperature": 0.35, "top_p": 0.9, "top_k": 20}
    with serving(text, model=replace(MODEL, sampling_defaults=defaults)) as server:
        browser.open(server.url + "/")
        browser.until("document.getElementById('temperature-shown').textContent === '0.35'")
        ask(browser, "Hi")
        browser.until("document.querySelector('.numbers') !== null && document.getElementById('go').textContent === 'Send'")
        sampling = server.engine.requests[-1].sampling
        assert {name: getattr(sampling, name) for name in defaults} == defaults


def test_a_chosen_temperature_is_kept_over_a_reload_until_it_is_reset(text, browser):
    with serving(text, model=replace(MODEL, sampling_defaults={"temperature": 0.35})) as server:
        browser.open(server.url + "/")
        browser.until("document.getElementById('temperature-shown').textContent === '0.35'")
        choose(browser, "temperature", 0)
        browser.open(server.url + "/")
        browser.until("document.getElementById('model').textContent.includes('smol')")
        assert browser.evaluate("document.getElementById('temperature-shown').textContent") == "0.00"
        ask(browser, "Hi")
        assert eventually(lambda: [each.sampling.temperature for each in server.engine.requests] == [0.0])
        browser.until("document.getElementById('go').textContent === 'Send'")
        browser.evaluate("document.getElementById('temperature-reset').click()")
        assert browser.evaluate("document.getElementById('temperature-shown').textContent") == "0.35"
        ask(browser, "Hi")
        assert eventually(lambda: [each.sampling.temperature for each in server.engine.requests] == [0.0, 0.35])
        browser.until("document.getElementById('go').textContent === 'Send'")
        browser.evaluate("localStorage.clear()")


def test_a_new_chat_begun_while_an_answer_comes_knows_nothing_of_it(server, browser, text):
    server.engine.script = Script(delay_seconds=0.02)
    browser.open(server.url + "/")
    ask(browser, "Go on for ever")
    browser.until("document.getElementById('go').textContent === 'Stop' && " + last(".assistant .text"))
    browser.evaluate("document.getElementById('clear').click()")
    assert eventually(lambda: not server.engine.live, 5.0)
    assert browser.evaluate("document.getElementById('go').textContent") == "Send"
    server.engine.script = Script(reply=says(text, "Hello."))
    ask(browser, "Good morning")
    browser.until(last(".assistant .text") + " === 'Hello.'")
    assert browser.evaluate("document.querySelectorAll('.message').length") == 2
    prompt = text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)
    assert prompt.count("<|im_start|>user") == 1
    assert prompt.count("<|im_start|>assistant") == 1


def test_dark_and_light_and_a_new_chat(server, browser):
    browser.open(server.url + "/")
    colour = "getComputedStyle(document.body).backgroundColor"
    first = browser.evaluate(colour)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(colour) != first
    shot(browser, "other-theme")
    browser.open(server.url + "/")
    assert browser.evaluate(colour) != first, "the choice is kept"
    ask(browser, "Hi")
    browser.until("document.querySelector('.assistant .numbers') && document.getElementById('go').textContent === 'Send'")
    shot(browser, "dark-chat")
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate("document.querySelectorAll('.message').length") == 0
    browser.evaluate("document.getElementById('theme').click()")


def test_nothing_is_fetched_from_elsewhere_and_no_policy_is_broken(server, browser):
    """After all of the above."""
    urls = [event["params"]["request"]["url"] for event in browser.events if event.get("method") == "Network.requestWillBeSent"]
    assert urls
    assert all(url.startswith(("http://127.0.0.1:", "data:", "about:")) for url in urls), urls
    complaints = [event["params"]["entry"] for event in browser.events if event.get("method") == "Log.entryAdded"]
    assert [entry for entry in complaints if entry["level"] != "info" and "429" not in entry["text"]] == []
    assert not [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]
