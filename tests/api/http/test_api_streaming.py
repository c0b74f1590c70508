"""Streams: the same text as a whole answer, stops held back, usage, errors, keep-alive."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_fakes import VOCAB, Script, eventually, says, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.api.config import ApiConfig
from baton.api.generate.engine_client import Delta
from baton.api.http.server import UvicornBody
from baton.api.limits import Limits
from baton.errors import Unavailable
from baton.protocol.request import FinishReason

CASES = int(os.environ.get("BATON_API_CASES", "40"))


def joined(events: list, kind: str = "chat") -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            new = choice["delta"].get("content") or "" if kind == "chat" else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


# A whole answer and a stream ---------------------------------------------------------------------------------------


@settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.text(max_size=20).map("a{}".format),  # some characters alone are no token at all
    seed=st.integers(0, 2**40),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 40),
    per_delta=st.integers(1, 4),
    stop=st.lists(st.text("aeinot s\ufffd", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 5),
    logprobs=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
)
def test_streamed_equals_whole(
    server, complete, stream, prompt, seed, n, max_tokens, per_delta, stop, include, skip, min_tokens, logprobs, echo
):
    server.engine.script = Script(tokens_per_delta=per_delta)
    fields = {
        "prompt": prompt, "seed": seed, "n": n, "max_tokens": max_tokens, "stop": stop, "logprobs": logprobs, "echo": echo,
        "include_stop_str_in_output": include, "skip_special_tokens": skip, "min_tokens": min(min_tokens, max_tokens),
        "return_token_ids": True,
    }  # fmt: skip
    whole = complete(**fields).json()
    events = stream("/v1/completions", {**fields, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert joined(events, "text") == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert events[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
        if logprobs is not None:
            for column in ("tokens", "token_logprobs", "text_offset"):
                assert [v for c in mine for v in c["logprobs"][column]] == choice["logprobs"][column]


@settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**40), n=st.integers(1, 3), max_tokens=st.integers(1, 30))
def test_streamed_chat_equals_whole_chat(server, chat, stream, seed, n, max_tokens):
    fields = {"seed": seed, "n": n, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": 1}
    whole = chat("hello", **fields).json()
    events = stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})
    assert joined(events) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == choice["index"]]
        assert [entry for c in mine for entry in c["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_whole_text_is_the_tokenizers(server, complete, text):
    answer = complete("abc", max_tokens=50, seed=3, ignore_eos=True, return_token_ids=True).json()["choices"][0]
    assert answer["text"] == text.tokenizer.decode(answer["token_ids"], at_text_start=False)
    assert answer["prompt_token_ids"] == text.tokenizer.encode("abc")


# Shape -------------------------------------------------------------------------------------------------------------


def test_first_chunk_has_role_and_text_together(server, stream, text):
    server.engine.script = Script(reply=says(text, "Hello there"))
    events = stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hello"}
    assert events[1]["choices"][0]["delta"] == {"content": " there"}
    assert events[-2]["choices"][0]["delta"] == {}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in event for event in events[:-1])
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["system_fingerprint"] == "fp_test"
    assert len({event["id"] for event in events[:-1]}) == 1


def test_empty_answer_still_has_role_and_finish(server, stream, chat, text):
    server.engine.script = Script(reply=says(text, ""))
    events = stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == ["stop"]
    assert chat("x").json()["choices"][0]["message"]["content"] == ""


def test_usage_in_the_last_chunk_and_in_every_chunk(server, stream, text):
    server.engine.script = Script(reply=says(text, "one two three"), cached_tokens=16)
    body = {"prompt": "count", "stream_options": {"include_usage": True}}
    events = stream("/v1/completions", body)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert all(event["usage"] is None for event in events[:-2])
    body["stream_options"]["continuous_usage_stats"] = True
    events = stream("/v1/completions", body)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 4, 4]


def test_what_siblings_compute_for_each_other_was_not_cached_before(server, complete):
    server.engine.script = Script(cached_tokens=16, cached_by_siblings=32)
    usage = complete("count", n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


# Stops -------------------------------------------------------------------------------------------------------------


def test_stop_string_over_several_tokens_is_held_back_and_ends_the_sequence_in_the_engine(server, stream, text):
    server.engine.script = Script(reply=says(text, "The answer is 42. END of story and much more follows here"))
    events = stream("/v1/completions", {"prompt": "q", "max_tokens": 60, "stop": [". END of"]})
    assert joined(events, "text")[0] == "The answer is 42"
    assert not any("." in event["choices"][0]["text"] for event in events[:-1])
    last = events[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", ". END of")
    request = server.engine.requests[0]
    assert (request.id, 0, FinishReason.STOP) in server.engine.aborts


def test_stop_of_one_sequence_leaves_its_siblings(server, complete, text):
    first, second = says(text, "aaa STOP bbb"), says(text, "aaa GO bbb")
    server.engine.script = Script(reply=lambda request, index: (second if index else first)(request, index))
    answer = complete("q", n=2, max_tokens=40, stop="STOP").json()
    assert [choice["text"] for choice in answer["choices"]] == ["aaa ", "aaa GO bbb"]
    assert server.engine.aborts == [(server.engine.requests[0].id, 0, FinishReason.STOP)]


def test_usage_counts_up_to_the_token_that_completed_the_stop(server, complete, text):
    server.engine.script = Script(reply=says(text, "one two three four five"), tokens_per_delta=5)
    answer = complete("q", max_tokens=40, stop=" two").json()
    assert answer["choices"][0]["text"] == "one"
    assert answer["usage"]["completion_tokens"] == 2


def test_stop_is_answered_even_where_the_engine_never_confirms_it(text, http):
    limits = Limits(engine_grace_seconds=0.3)
    with serving(text, ApiConfig(limits=limits)) as server:
        server.engine.script = Script(reply=says(text, "one STOP two " * 30), deaf=True, delay_seconds=0.05)
        began = time.monotonic()
        answer = http.post(server.url + "/v1/completions", json={"prompt": "q", "max_tokens": 400, "stop": "STOP"}).json()
        assert answer["choices"][0]["text"] == "one "
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "known with the first token"
        assert time.monotonic() - began < 2.0
        assert eventually(lambda: not server.engine.live)


def test_no_stop_string_counts_before_min_tokens(server, complete, text):
    server.engine.script = Script(reply=says(text, "one two three one two three"))
    assert complete("q", stop=" two", min_tokens=2).json()["choices"][0]["text"] == "one two three one"
    assert complete("q", stop=" two", min_tokens=1).json()["choices"][0]["text"] == "one"


def test_named_stop_token_is_told_and_has_no_text_unless_asked(server, complete, text):
    ids = text.tokenizer.encode("red green blue", add_special_tokens=False)
    server.engine.script = Script(reply=lambda request, index: ids)
    choice = complete("q", stop_token_ids=[ids[1]]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("red", "stop", ids[1])
    choice = complete("q", stop_token_ids=[ids[1]], include_stop_str_in_output=True).json()["choices"][0]
    assert choice["text"] == "red green"


def test_end_of_text_stops_unless_ignored(server, complete, text):
    words = text.tokenizer.encode("red green", add_special_tokens=False)
    reply = [words[0], text.tokenizer.eos_ids[0], words[1]]
    server.engine.script = Script(reply=lambda request, index: reply)
    choice = complete("q").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("red", "stop")
    assert "stop_reason" not in choice, "the client has not named it"
    choice = complete("q", ignore_eos=True).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("red green", "length")


# Failures ----------------------------------------------------------------------------------------------------------


def test_failure_on_the_way_is_an_error_event_without_done(server, http, text):
    server.engine.script = Script(reply=says(text, "a b c d e f"), fail_after=3, error=Unavailable("the engine was lost"))
    with http.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["message"] == "the engine was lost"
    assert not any("[DONE]" in line for line in lines)
    assert len(lines) == 4


def test_what_came_before_a_failure_is_not_lost_with_it(server, http, monkeypatch):
    """Also where nothing of it has been sent yet: then the status is 200."""

    async def generate(request, take):
        take(Delta(0, [300]))
        raise Unavailable("the engine was lost")

    monkeypatch.setattr(server.engine, "generate", generate)
    with http.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert events[0]["choices"][0]["finish_reason"] is None
    assert [event["error"]["code"] for event in events[1:]] == ["unavailable"]


def test_failure_before_the_first_token_is_a_status(server, http):
    server.engine.script = Script(fail_after=0, error=Unavailable("the engine was lost"))
    for wanted in (True, False):
        answer = http.post(server.url + "/v1/completions", json={"prompt": "x", "stream": wanted})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


def test_failed_row_is_a_500_with_its_detail(server, complete):
    server.engine.script = Script(end_error_after=2)
    answer = complete("x")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "row failed: NaN logits",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_unexpected_failure_tells_the_client_nothing_of_it(server, complete):
    server.engine.script = Script(fail_after=1)
    answer = complete("x")
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_aborted_request_ends_with_what_it_has(server, http, text):
    server.engine.script = Script(delay_seconds=0.02)
    events = []
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 2:
                    done = http.post(server.url + "/v1/abort", json={"request_id": events[0]["id"]}).json()
                    assert done["aborted"] == 1
    assert (events[-1]["choices"][0]["finish_reason"], events[-1]["choices"][0]["ended_by"]) == ("length", "abort")

    def is_forgotten() -> bool:  # the client may have its last event before the server has put the request away
        return http.post(server.url + "/v1/abort", json={"request_id": events[0]["id"]}).json()["aborted"] == 0

    assert eventually(is_forgotten)


def test_an_abort_ends_every_prompt_of_the_request(server, http):
    server.engine.script = Script(delay_seconds=0.02)
    body = {"prompt": ["a", "b", "c"], "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(http.post, server.url + "/v1/completions", json=body, headers={"X-Request-Id": "three"})
        assert eventually(lambda: len(server.engine.live) == 3)
        assert http.post(server.url + "/v1/abort", json={"request_id": "three"}).json()["aborted"] == 1
        choices = asking.result(20).json()["choices"]
    assert [choice["ended_by"] for choice in choices] == ["abort"] * 3


def test_deadline_with_some_tokens_gives_them(server, complete):
    server.engine.script = Script(delay_seconds=0.05)
    choice = complete("x", timeout=0.3, max_tokens=200, ignore_eos=True, return_token_ids=True).json()["choices"][0]
    assert (choice["finish_reason"], choice["ended_by"]) == ("length", "timeout")
    assert 1 <= len(choice["token_ids"]) <= 6


def test_deadline_without_a_token_is_504(server, complete):
    server.engine.script = Script(delay_seconds=0.3)
    answer = complete("x", timeout=0.1)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"


def test_a_choice_without_a_token_at_the_deadline_does_not_take_the_others_along(server, complete, monkeypatch):
    async def generate(request, take):
        take(Delta(0, [7]))
        for index in (1, 0):
            take(Delta(index, ended=server.engine._end(request, index, FinishReason.TIMEOUT, 1 - index)))

    monkeypatch.setattr(server.engine, "generate", generate)
    answer = complete("x", n=2, timeout=5, return_token_ids=True)
    assert [choice["ended_by"] for choice in answer.json()["choices"]] == ["timeout", "timeout"]


@pytest.mark.parametrize("streamed", [True, False])
def test_silent_engine_is_left_after_deadline_and_grace(text, http, streamed):
    with serving(text, ApiConfig(limits=Limits(engine_grace_seconds=0.1))) as server:
        server.engine.script = Script(silent=True)
        began = time.monotonic()
        answer = http.post(server.url + "/v1/completions", json={"prompt": "x", "timeout": 0.2, "stream": streamed})
        assert answer.status_code == 504
        assert time.monotonic() - began < 1.5
        assert server.engine.aborts
        assert eventually(lambda: not server.engine.live)


# Keep-alive --------------------------------------------------------------------------------------------------------


def test_idle_stream_gets_comment_lines_and_then_its_text(text, http):
    with serving(text, ApiConfig(keep_alive_seconds=0.1)) as server:
        server.engine.script = Script(reply=says(text, "late"), delay_seconds=0.35)
        with http.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[0] == ": keep-alive"
        assert lines.count(": keep-alive") >= 4
        assert lines[-1] == "data: [DONE]"


def test_refusal_after_the_headers_is_an_error_event(text, http):
    with serving(text, ApiConfig(keep_alive_seconds=0.05)) as server:
        server.engine.script = Script(delay_seconds=0.2, fail_after=0, error=Unavailable("gone"))
        with http.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200
        assert json.loads(lines[-1][6:])["error"]["code"] == "unavailable"


def test_pseudo_tokens_reach_into_the_vocabulary(server, complete):
    ids = complete("x", max_tokens=400, seed=1, ignore_eos=True, return_token_ids=True).json()["choices"][0]["token_ids"]
    assert min(ids) < 17
    assert max(ids) > 10_000
    assert max(ids) < VOCAB


# Events that have only text are cut out of one that was made in full -------------------------------------------------


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_with_text_alone_are_like_those_made_in_full(server, stream, text, path, include_usage):
    said = 'a "quoted" \\ word,\u2028 a line\x85 and \u2029 more, <data: {} 🙂 你好 </s> and the end'
    server.engine.script = Script(reply=says(text, said))
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"n": 2, "max_tokens": 200, "stream_options": {"include_usage": include_usage}}
    short, full = stream(path, body), stream(path, {**body, "return_token_ids": True})  # the latter are always made in full
    assert joined(short, path.split("/")[2].replace("completions", "text")) == {0: said, 1: said}
    assert len(short) == len(full) > 20
    for one, other in zip(short[:-1], full[:-1], strict=True):
        for choice in other["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        other["id"], other["created"] = one["id"], one["created"]
        assert list(one) == list(other)
        assert one == other


@pytest.mark.parametrize("broken", ["ready", "write"])
def test_streams_go_on_where_the_short_way_to_the_socket_breaks(server, stream, text, monkeypatch, broken):
    """It reads private parts of uvicorn. With another version of it only the speed may change."""

    def fails(*_):
        raise AttributeError("no such thing in this version")

    monkeypatch.setattr(UvicornBody, broken, property(fails) if broken == "ready" else fails)
    server.engine.script = Script(reply=says(text, "one two three four"), delay_seconds=0.02)
    *events, last = stream("/v1/completions", {"prompt": "x", "max_tokens": 20})
    assert last == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == "one two three four"
