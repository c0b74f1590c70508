"""Nothing that changes an answer is ignored in silence, and values mean here what they mean elsewhere."""

from __future__ import annotations

import pytest
from api_fakes import CONTEXT, Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.api.openai.known_fields import ALIASES, HARMLESS, UNSUPPORTED

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# What the review sent and had answered with 200, as if it had not been there.
ONCE_IGNORED = {
    "structural_tag": {"type": "structural_tag"},
    "format": "json",
    "options": {"temperature": 0},
    "images": ["aGVsbG8="],
    "input_ids": [1, 2, 3],
    "lora_request": {"lora_name": "a"},
    "guided_whitespace_pattern": "\\s",
    "typical_p": 0.5,
    "top_a": 0.1,
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "extra_body": {"top_k": 5},
    "system": "You are a pirate.",
    "do_sample": False,
}


def error_of(answer) -> dict:
    assert answer.status_code == 400, (answer.status_code, answer.text[:300])
    return answer.json()["error"]


def ignored(answer) -> list[str]:
    assert answer.status_code == 200, answer.text[:300]
    return answer.headers.get("x-baton-ignored", "").split(", ")


# Fields -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONCE_IGNORED)
def test_what_would_change_the_answer_is_refused(server, complete, chat, name):
    for call in (complete, chat):
        error = error_of(call("x", **{name: ONCE_IGNORED[name]}))
        assert (error["param"], error["code"]) == (name, "unsupported")
    assert not server.engine.requests


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_values_that_ask_for_nothing_pass(server, complete, name):
    for value in (None, *UNSUPPORTED[name]):
        assert ignored(complete("x", **{name: value})) == [""], value


def test_numbers_that_ask_for_nothing(server, complete):
    assert complete("x", typical_p=1.0, mirostat=0, dry_multiplier=0.0, num_beams=1).status_code == 200
    assert error_of(complete("x", mirostat=False))["param"] == "mirostat"  # a boolean is no number


@pytest.mark.parametrize(
    ("fields", "param"), [({"best_of": 4}, "best_of"), ({"echo": True}, "echo"), ({"best_of": 0}, "best_of")]
)
def test_chats_have_no_best_of_and_no_echo(server, chat, fields, param):
    assert error_of(chat("x", **fields))["param"] == param
    assert chat("x", best_of=1, echo=False).status_code == 200


@pytest.mark.parametrize("alias", ALIASES["max_tokens"])
def test_other_names_for_max_tokens(server, complete, chat, alias):
    for call in (complete, chat):
        assert call("x", **{alias: 3}).status_code == 200
        assert server.engine.requests[-1].sampling.max_tokens == 3
        assert call("x", **{alias: 3, "max_tokens": 3}).status_code == 200
        error = error_of(call("x", **{alias: 3, "max_tokens": 4}))
        assert error["param"] == alias
        assert error_of(call("x", **{alias: "3"}))["param"] == alias


@pytest.mark.parametrize("alias", ALIASES["stop"])
def test_other_names_for_stop(server, complete, text, alias):
    server.engine.script = Script(reply=says(text, "one two three"))
    assert complete("x", **{alias: [" two"]}).json()["choices"][0]["text"] == "one"


def test_another_name_for_min_tokens(server, complete):
    complete("x", min_new_tokens=2)
    assert server.engine.requests[-1].sampling.min_tokens == 2


def test_unknown_fields_are_named_in_a_header(server, complete, chat, http):
    assert ignored(complete("x", foo=1, verbosity="low", other={"a": 1}, nothing=None)) == [
        "foo", "verbosity", "other",
    ]  # fmt: skip
    assert ignored(chat("x", verbosity="low")) == ["verbosity"]
    assert ignored(http.post(server.url + "/tokenize", json={"prompt": "x", "bar": 1})) == ["bar"]
    assert ignored(http.post(server.url + "/detokenize", json={"tokens": [5], "bar": 1})) == ["bar"]
    assert ignored(http.post(server.url + "/v1/abort", json={"request_id": "x", "bar": 1})) == ["bar"]
    assert ignored(complete("x", stream=True, stream_options={"include_usage": True, "foo": 1})) == ["stream_options.foo"]


def test_harmless_fields_are_not_named(server, complete):
    values = dict.fromkeys(HARMLESS, "x")
    assert ignored(complete("x", **values)) == [""]


def test_odd_names_in_the_header_are_escaped_and_bounded(server, complete):
    names = ignored(complete("x", **{"a b\r\nSet-Cookie: x": 1, "é" * 500: 1}))
    assert names[0] == "a%20b%0D%0ASet-Cookie%3A%20x"
    assert len(names[1]) <= 64 * 6
    assert ignored(complete("x", **{f"k{number}": 1 for number in range(200)}))[-1] == "and 168 more"


def test_unknown_fields_can_be_refused(text, http):
    with serving(text, ApiConfig(unknown_fields="refuse")) as strict:
        error = error_of(
            http.post(strict.url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "verbosity": "low"})
        )
        assert (error["param"], error["code"]) == ("verbosity", "unknown_field")
        body = {"prompt": "x", "stream": True, "stream_options": {"foo": 1}}
        assert error_of(http.post(strict.url + TEXT, json=body))["param"] == "stream_options.foo"


def test_enable_thinking_is_for_the_template(server, http):
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "enable_thinking": False}
    assert http.post(server.url + CHAT, json=body).status_code == 200
    assert error_of(http.post(server.url + CHAT, json={**body, "enable_thinking": "no"}))["param"] == "enable_thinking"
    both = {**body, "chat_template_kwargs": {"enable_thinking": True}}
    assert error_of(http.post(server.url + CHAT, json=both))["param"] == "enable_thinking"


# Values -------------------------------------------------------------------------------------------------------------


def test_seed_minus_one_is_random(server, complete):
    for _ in range(2):
        complete("x", seed=-1)
    first, second = (request.sampling.seed for request in server.engine.requests)
    assert first != second
    complete("x", seed=-2)
    assert server.engine.requests[-1].sampling.seed == -2


@pytest.mark.parametrize("name", ["max_tokens", *ALIASES["max_tokens"]])
def test_max_tokens_minus_one_is_up_to_the_context(server, complete, chat, name):
    for call in (complete, chat):
        assert call("x", **{name: -1}).status_code == 200
        request = server.engine.requests[-1]
        assert request.sampling.max_tokens == CONTEXT - len(request.prompt)
        assert error_of(call("x", **{name: -2}))["param"] == name


def test_max_completion_tokens_minus_one_too(server, chat):
    chat("x", max_completion_tokens=-1, max_tokens=3)
    request = server.engine.requests[-1]
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)


@pytest.mark.parametrize("n", [1, 2])
def test_max_tokens_zero_with_echo_is_the_prompt_alone(server, complete, text, n):
    answer = complete("Once upon a time", max_tokens=0, echo=True, logprobs=1, n=n).json()
    ids = text.tokenizer.encode("Once upon a time")
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == len(ids)
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
    assert error_of(complete("x", max_tokens=0))["param"] == "max_tokens"
    assert error_of(complete("x", max_tokens=False, echo=True))["param"] == "max_tokens"


def test_max_tokens_zero_with_echo_as_a_stream(server, stream):
    *events, _ = stream(TEXT, {"prompt": "Once upon", "max_tokens": 0, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events) == "Once upon"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_top_p_zero_is_the_likeliest_token(server, complete):
    assert ignored(complete("x", top_p=0, temperature=1.0, top_k=40)) == [""]
    sampling = server.engine.requests[-1].sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 1.0)
    complete("x", top_p=0.5, top_k=40)
    assert (server.engine.requests[-1].sampling.top_k, server.engine.requests[-1].sampling.top_p) == (40, 0.5)


def test_temperature_above_two_is_refused_and_says_whose_rule_it_is(server, complete):
    message = error_of(complete("x", temperature=2.5))["message"]
    assert "2.5" in message
    assert "OpenAI's maximum" in message


@pytest.mark.parametrize("stop", ["", [""], ["", ""], []])
def test_an_empty_stop_string_stops_nothing(server, complete, text, stop):
    server.engine.script = Script(reply=says(text, "one two"))
    choice = complete("x", stop=stop, max_tokens=50).json()["choices"][0]
    assert choice["text"] == "one two"


def test_an_empty_stop_string_beside_others(server, complete, text):
    server.engine.script = Script(reply=says(text, "one two"))
    assert complete("x", stop=["", " two"], max_tokens=50).json()["choices"][0]["text"] == "one"


# Priority -----------------------------------------------------------------------------------------------------------


def test_clients_may_step_back_but_not_overtake(server, complete):
    assert complete("x", priority=5).status_code == 200
    assert server.engine.requests[-1].priority == 5
    error = error_of(complete("x", priority=-1))
    assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
    assert "--client-priority-min" in error["message"]


def test_who_may_overtake(text, http):
    config = ApiConfig(api_keys=("client",), admin_api_keys=("admin",), client_priority_min=-3)
    with serving(text, config) as server:
        for key, priority, status in (("client", -3, 200), ("client", -4, 400), ("admin", -(2**31), 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = http.post(server.url + TEXT, json={"prompt": "x", "priority": priority}, headers=headers)
            assert answer.status_code == status, (key, priority)


def test_a_request_without_priority_has_the_best_that_clients_may_have(text, http):
    with serving(text, ApiConfig(client_priority_min=7)) as server:
        assert http.post(server.url + TEXT, json={"prompt": "x"}).status_code == 200
        assert server.engine.requests[-1].priority == 7


# Abort --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_abort_while_the_request_is_being_prepared(server, http, stream, monkeypatch):
    """It has no id in the engine yet, and must never get one that runs."""
    import threading

    front, prepared = server.app.state.front, threading.Event()
    real = front.schema.completion

    def slow(body):
        prepared.wait(10)
        return real(body)

    monkeypatch.setattr(front.schema, "completion", slow)
    answers = []
    body = {"prompt": "x " * 10_000, "stream": stream}  # large enough for a thread

    def ask() -> None:
        answers.append(http.post(server.url + TEXT, json={**body, "prompt": [5]}, headers={"X-Request-Id": "mine"}))

    monkeypatch.setattr("baton.api.front._INLINE_BYTES", 0)
    thread = threading.Thread(target=ask)
    thread.start()
    assert eventually(lambda: len(front.live) == 1)
    assert http.post(server.url + "/v1/abort", json={"request_id": "mine"}).json()["aborted"] == 1
    prepared.set()
    thread.join(10)
    assert answers[0].status_code == 200
    assert '"finish_reason":"length","ended_by":"abort"' in answers[0].text
    assert not server.engine.requests
