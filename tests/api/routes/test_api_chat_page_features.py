"""The chat page in a real browser: markdown, system prompt, edit, retry, history, reasoning, tools.

Answers that a scripted engine cannot give (reasoning, tool calls) come from a `fetch` that the test puts into the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from api_fakes import Script, Serving, says
from chromium import Browser, chromium_path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium_path()
    if path is None:
        pytest.skip("no chromium here")
    made = Browser(path)
    yield made
    made.close()


@pytest.fixture
def page(server: Serving, browser: Browser) -> Iterator[Browser]:
    browser.open(server.url + "/")
    browser.evaluate("localStorage.clear()")
    browser.open(server.url + "/?" + os.urandom(4).hex())
    yield browser
    browser.evaluate("localStorage.clear()")
    assert not [event for event in browser.events if event.get("method") == "Runtime.exceptionThrown"]


IDLE = "document.getElementById('go').textContent === 'Send'"


def shot(browser: Browser, name: str) -> None:
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        browser.screenshot(f"{folder}/{name}.png")


def ask(browser: Browser, text: str) -> None:
    browser.evaluate("document.getElementById('input').focus()")
    browser.type(text)
    browser.press_enter()


def fill(browser: Browser, control: str, value: str) -> None:
    set_value = f"const c = document.getElementById('{control}'); c.value = {json.dumps(value)}"
    browser.evaluate(f"{{ {set_value}; c.dispatchEvent(new Event('input')); }}")


def count(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def click(browser: Browser, selector: str, words: str) -> None:
    browser.until(
        f"(() => {{ const found = [...document.querySelectorAll({json.dumps(selector)})].filter((b) => b.textContent === "
        f"{json.dumps(words)}).at(-1); found?.click(); return !!found; }})()"
    )


def rendered(browser: Browser, markdown: str) -> str:
    return browser.evaluate(
        f"(() => {{ const box = element('div'); renderMarkdown(box, {json.dumps(markdown)}); return box.innerHTML; }})()"
    )


def last_prompt(server: Serving, text) -> str:
    return text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)


MARKDOWN = {
    "**bold** and *italic* and `co*de*`": "<p><strong>bold</strong> and <em>italic</em> and <code>co*de*</code></p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "~~gone~~ __strong__ _soft_": "<p><del>gone</del> <strong>strong</strong> <em>soft</em></p>",
    "**never closed and *neither": "<p>**never closed and *neither</p>",
    "\\*plain\\*": "<p>*plain*</p>",
    "one\ntwo": "<p>one<br>two</p>",
    "# Top\ntext\n## Next": "<h2>Top</h2><p>text</p><h3>Next</h3>",
    "- a\n- b\n  - c\n\ntext": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>text</p>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> said\n> he": "<blockquote><p>said<br>he</p></blockquote>",
    "---": "<hr>",
    "<b>no</b> <img src=x onerror=alert(1)>": "<p>&lt;b&gt;no&lt;/b&gt; &lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "see https://a.example/x_y_z.": '<p>see <a href="https://a.example/x_y_z" target="_blank" rel="noopener noreferrer">'
    "https://a.example/x_y_z</a>.</p>",
    "[a *b*](https://a.example)": '<p><a href="https://a.example" target="_blank" rel="noopener noreferrer">'
    "a <em>b</em></a></p>",
    "|a|b|\n|-|-:|\n|1|2|": '<div class="table"><table><thead><tr><th>a</th><th style="text-align: right;">b</th></tr></thead>'
    '<tbody><tr><td>1</td><td style="text-align: right;">2</td></tr></tbody></table></div>',
}  # fmt: skip


def test_markdown_becomes_elements_and_html_stays_text(page: Browser):
    for source, html in MARKDOWN.items():
        assert rendered(page, source) == html, source


def test_markdown_looks_the_same_however_it_came(page: Browser):
    source = "\n\n".join(MARKDOWN) + "\n\n```py\nprint('|')\n\n# no heading\n```\nend"
    same = page.evaluate(
        f"(() => {{ const text = {json.dumps(source)}, box = element('div'), whole = element('div');"
        "renderMarkdown(whole, text);"
        "for (let n = 1; n <= text.length; n += 7) renderMarkdown(box, text.slice(0, n)); renderMarkdown(box, text);"
        "return box.innerHTML === whole.innerHTML; })()"
    )
    assert same


def test_hostile_markdown_is_drawn_within_the_deadline(page: Browser):
    """A pattern that went back over what it has read would need hours for this: evaluate() has a deadline."""
    for hostile in ("*a ", "**", "_*", "`", "[", "[a](", "> ", "- ", "|-", "~~a", "![", "http://", "# ", " -"):
        assert len(rendered(page, hostile * 20_000)) > 0, hostile
        assert len(rendered(page, (hostile + "\n") * 2_000)) > 0, hostile


def test_a_code_block_is_copied_as_it_is(page: Browser, server: Serving, text):
    code = "def f(a):\n    return a < 1"
    server.engine.script = Script(reply=says(text, f"Here:\n```python\n{code}\n```\nDone."))
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => { window.copied = text; }}})")
    ask(page, "Code, please")
    page.until(IDLE + " && document.querySelector('.code') !== null")
    assert page.evaluate("document.querySelector('.code pre').textContent") == code
    assert page.evaluate("document.querySelector('.code-head span').textContent") == "python"
    click(page, ".code button", "Copy")
    page.until("document.querySelector('.code button').textContent === 'Copied'")
    assert page.evaluate("window.copied") == code


def test_the_system_prompt_is_the_chat_s(page: Browser, server: Serving, text):
    server.engine.script = Script(reply=says(text, "Aye."))
    page.evaluate("document.getElementById('settings-button').click()")
    fill(page, "system", "You are a pirate.")
    shot(page, "settings")
    ask(page, "Hello")
    page.until(IDLE + " && document.querySelector('.assistant .numbers') !== null")
    assert "<|im_start|>system\nYou are a pirate.<|im_end|>" in last_prompt(server, text)


def test_retry_asks_again_and_edit_goes_back(page: Browser, server: Serving, text):
    server.engine.script = Script(reply=says(text, "One."))
    ask(page, "First")
    page.until(IDLE + " && document.querySelector('.assistant .numbers') !== null")
    server.engine.script = Script(reply=says(text, "Two."))
    click(page, ".assistant .below button", "Retry")
    page.until(IDLE + " && document.querySelector('.assistant .text').textContent === 'Two.'")
    assert count(page, ".message") == 2
    assert "One." not in last_prompt(server, text)
    ask(page, "Second")
    page.until(IDLE + " && document.querySelectorAll('.message').length === 4")
    page.evaluate("[...document.querySelectorAll('.user .below button')].find((b) => b.textContent === 'Edit').click()")
    page.evaluate("document.querySelector('.edit textarea').value = 'Changed'")
    click(page, ".edit button", "Send")
    page.until(IDLE + " && document.querySelectorAll('.message').length === 2")
    assert page.evaluate("document.querySelector('.user .text').textContent") == "Changed"
    prompt = last_prompt(server, text)
    assert "Changed<|im_end|>" in prompt
    assert "First" not in prompt


def test_a_retry_while_an_answer_comes_replaces_it(page: Browser, server: Serving, text):
    server.engine.script = Script(delay_seconds=0.02)
    ask(page, "Go on")
    page.until("document.querySelector('.assistant .text').textContent.length > 3")
    server.engine.script = Script(reply=says(text, "Short."))
    page.evaluate("actions.retry(chat.messages.at(-1))")
    page.until(IDLE + " && document.querySelector('.assistant .text').textContent === 'Short.'")
    assert page.evaluate("chat.messages.map((m) => m.role).join()") == "user,assistant"


def test_escape_stops(page: Browser, server: Serving):
    server.engine.script = Script(delay_seconds=0.02)
    ask(page, "Go on")
    page.until("document.querySelector('.assistant .text').textContent.length > 3")
    page.evaluate("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    page.until(IDLE + " && document.querySelector('.numbers').textContent.includes('stopped')")


def test_chats_are_there_after_a_reload_and_can_be_deleted(page: Browser, server: Serving, text):
    server.engine.script = Script(reply=says(text, "Remembered."))
    ask(page, "The first chat")
    page.until(IDLE + " && document.querySelector('.assistant .numbers') !== null")
    page.evaluate("document.getElementById('clear').click()")
    ask(page, "The second chat")
    page.until(IDLE + " && document.querySelector('.assistant .numbers') !== null")
    page.open(server.url + "/?again")
    assert page.evaluate("[...document.querySelectorAll('.chat-row .open')].map((b) => b.textContent)") == [
        "The second chat",
        "The first chat",
    ]
    assert count(page, ".message") == 0
    click(page, ".chat-row .open", "The first chat")
    assert page.evaluate("[...document.querySelectorAll('.message .text')].map((b) => b.textContent)") == [
        "The first chat",
        "Remembered.",
    ]
    ask(page, "Go on there")
    page.until(IDLE + " && document.querySelectorAll('.message').length === 4")
    assert "The first chat" in last_prompt(server, text)
    page.evaluate("document.querySelector('.chat-row.active .drop').click()")
    assert count(page, ".chat-row") == 1
    assert count(page, ".message") == 0


def test_storage_that_is_full_or_broken_costs_the_oldest_and_nothing_else(page: Browser):
    page.evaluate("localStorage.setItem('baton.chats', '{broken')")
    assert page.evaluate("readChats().length") == 0
    page.evaluate(
        "for (let n = 0; n < 20; n += 1) keepChat({...newChat(), messages: [{role: 'user', content: n + 'x'.repeat(600000)}]})"
    )
    kept = page.evaluate("readChats().map((chat) => parseInt(chat.messages[0].content))")
    assert kept[0] == 19
    assert 1 < len(kept) < 20


def answer_with(page: Browser, *deltas: dict) -> None:
    """The next answers of `fetch` are these deltas; what was asked is in window.asked."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    keep = "window.asked = JSON.parse(options.body)"
    page.evaluate(f"window.fetch = async (url, options) => {{ {keep}; return new Response({json.dumps(events)}); }}")


def test_reasoning_is_folded_and_not_sent_back(page: Browser):
    answer_with(page, {"reasoning_content": "Let me *think*"}, {"reasoning_content": " more."}, {"content": "42"})
    ask(page, "What is it?")
    page.until(IDLE + " && document.querySelector('.assistant .text').textContent === '42'")
    assert page.evaluate("document.querySelector('.thought').open") is False
    assert "Thought for" in page.evaluate("document.querySelector('.thought summary').textContent")
    page.evaluate("document.querySelector('.thought summary').click()")
    assert page.until("document.querySelector('.thinking').textContent") == "Let me think more."
    shot(page, "reasoning")
    ask(page, "Sure?")
    page.until(IDLE + " && document.querySelectorAll('.message').length === 4")
    assert page.evaluate("window.asked.messages") == [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Sure?"},
    ]


def test_tool_calls_are_shown_and_their_results_sent(page: Browser):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    fill(page, "tools", json.dumps(tools))
    answer_with(
        page,
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call-2", "function": {"name": "weather", "arguments": "{}"}}]},
    )
    ask(page, "Weather in Rome?")
    page.until(IDLE + " && document.querySelectorAll('.call textarea').length === 2")
    assert page.evaluate("window.asked.tools") == tools
    assert page.evaluate("document.querySelector('.call b').textContent") == "weather"
    assert page.evaluate("document.querySelector('.call pre').textContent") == '{\n  "city": "Rome"\n}'
    shot(page, "tools")
    page.evaluate("document.querySelector('.call textarea').value = 'sunny'")
    answer_with(page, {"content": "It is sunny."})
    click(page, ".calls button", "Send results")
    page.until(IDLE + " && [...document.querySelectorAll('.assistant .text')].at(-1).textContent === 'It is sunny.'")
    sent = page.evaluate("window.asked.messages")
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert (sent[2]["tool_call_id"], sent[2]["content"], sent[3]["content"]) == ("call-1", "sunny", "")


def test_tools_that_are_no_json_are_said_and_nothing_is_sent(page: Browser, server: Serving):
    fill(page, "tools", '{"type"')
    asked = len(server.engine.requests)
    ask(page, "Hello")
    assert "not JSON" in page.until("document.getElementById('tools-problem').textContent")
    assert len(server.engine.requests) == asked


def test_reasoning_can_be_turned_off(page: Browser):
    answer_with(page, {"content": "Yes."})
    page.evaluate("document.getElementById('reasoning').value = 'off'")
    ask(page, "Quick")
    page.until(IDLE + " && document.querySelector('.assistant .numbers') !== null")
    assert page.evaluate("window.asked.chat_template_kwargs") == {"enable_thinking": False}


def test_an_answer_that_is_no_json_is_an_error_that_can_be_tried_again(page: Browser):
    page.evaluate("window.fetch = async () => new Response('<h1>Bad gateway</h1>', {status: 502})")
    ask(page, "Hello")
    assert "502 <h1>Bad gateway</h1>" in page.until(IDLE + " && document.querySelector('.failure').textContent")
    answer_with(page, {"content": "Here."})
    click(page, ".assistant .below button", "Retry")
    page.until(IDLE + " && document.querySelector('.assistant .text').textContent === 'Here.'")
    assert page.evaluate("window.asked.messages") == [{"role": "user", "content": "Hello"}]
