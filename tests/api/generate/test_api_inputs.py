"""Bad inputs, one test per kind. Nothing of them may reach the engine, and none is a 5xx."""

from __future__ import annotations

import gzip
import json
import socket
import time

import pytest
from api_fakes import CONTEXT, MODEL, VOCAB, Script, says, serving

from baton.api.config import ApiConfig
from baton.api.limits import RANGES, Limits
from baton.api.openai.known_fields import INTERNAL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, TEXT, "/tokenize", "/detokenize", "/v1/abort")


def post_raw(http, server, body: bytes, path: str = TEXT, **headers: str):
    return http.post(server.url + path, content=body, headers={"content-type": "application/json", **headers})


def refused(answer, param: str | None = None) -> str:
    assert answer.status_code == 400, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


def raw(socket_: socket.socket, data: bytes) -> bytes:
    socket_.sendall(data)
    received = b""
    socket_.settimeout(5)
    while chunk := socket_.recv(65536):
        received += chunk
    return received


def exchange(server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        return raw(connection, data)


# 61 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"nonsense", b"null", b"[]", b"5", b'"text"', b"{", b"{}{}", b'{"a":1} x',
     b'{"a":1,"a":2}', b'{"x":{"b":1,"b":1}}', b"{'a':1}"],
)  # fmt: skip
def test_61_not_a_json_object(server, http, path, body):
    if path == "/v1/abort" and body == b"":
        return  # an empty body is an empty object there
    refused(post_raw(http, server, body, path))
    assert not server.engine.requests


def test_61_the_place_is_named(server, http):
    assert "line 2, column 3" in refused(post_raw(http, server, b"{\n  x: 1}"))
    assert "'prompt' twice" in refused(post_raw(http, server, b'{"prompt":"a","prompt":"b"}'))


def test_61_too_many_keys(server, http):
    refused(post_raw(http, server, json.dumps({"prompt": "x", **{f"k{i}": 1 for i in range(300)}}).encode()))
    refused(post_raw(http, server, json.dumps({"prompt": "x", "metadata": {f"k{i}": 1 for i in range(1100)}}).encode()))


# 62, 64 ------------------------------------------------------------------------------------------------------------

NUMERIC = [name for name in RANGES if name not in ("drain_seconds", "top_logprobs", "max_completion_tokens")]


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("value", ["5", True, False, [1], {"a": 1}, "", 2**63, -(2**63) - 1, 10**400, 1e308, -1e308])
def test_62_wrong_types_and_huge_numbers(server, complete, name, value):
    refused(complete("x", **{name: value}), name)
    assert not server.engine.requests


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 5000])
def test_62_literals_that_are_not_numbers(server, http, name, literal):
    refused(post_raw(http, server, b'{"prompt":"x","%s":%s}' % (name.encode(), literal.encode())))


@pytest.mark.parametrize("name", [name for name in NUMERIC if RANGES[name].whole])
@pytest.mark.parametrize("value", [1.0, 1.5, -0.0])
def test_62_whole_numbers_are_whole(server, complete, name, value):
    refused(complete("x", **{name: value}), name)


def test_62_minus_zero_is_zero(server, complete):
    assert complete("x", temperature=-0.0).status_code == 200
    assert str(server.engine.requests[0].sampling.temperature) == "0.0"


@pytest.mark.parametrize("name", ["stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids"])
@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_62_booleans_are_booleans(server, complete, name, value):
    refused(complete("x", **{name: value}), name)


# 63 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"n": 10**9}, {"n": 17}, {"n": 0}, {"n": -1}, {"best_of": 10**6}, {"n": 4, "best_of": 2}])
def test_63_n_and_best_of(server, complete, fields):
    began = time.monotonic()
    refused(complete("x", **fields))
    assert time.monotonic() - began < 1


def test_63_many_prompts(server, complete):
    refused(complete(["x"] * 65), "prompt")
    refused(complete(["x"] * 10**6), "prompt")
    refused(complete([[1]] * 10**5), "prompt")
    refused(complete(["x"] * 33, n=2), "n")
    assert not server.engine.requests
    assert complete(["x"] * 64, max_tokens=1).status_code == 200


def test_63_product_of_all(text, http):
    with serving(text, ApiConfig(limits=Limits(request_tokens=1000, logprob_entries=5000))) as server:
        url = server.url + TEXT
        refused(http.post(url, json={"prompt": ["x"] * 4, "n": 4, "max_tokens": 100}), "max_tokens")
        refused(http.post(url, json={"prompt": "x", "max_tokens": 400, "logprobs": 20}), "logprobs")
        assert not server.engine.requests


# 64 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("temperature", [-1, -0.001, 2.001, 1e308], [0, 0.0, 2, 1]),
        ("top_p", [2, -0.1, 1.0001], [1, 0.5, 1e-9, 0, 0.0]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("top_k", [-5, -2, 2**31], [-1, 0, 1, VOCAB, VOCAB + 1]),
        ("presence_penalty", [-2.1, 2.1, 1e9, -1e9], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1, 1e9, -1e9], [-2, 2]),
        ("repetition_penalty", [0, -1, 10.1, 1e9], [0.1, 10, 1]),
        ("logprobs", [-1, 21, 10**9], [0, 20]),
        ("prompt_logprobs", [-1, 21], [0, 20]),
        ("seed", [2**63, -(2**63) - 1], [2**63 - 1, -(2**63), 0]),
        ("timeout", [0, -1, 3601], [0.5, 3600]),
        ("priority", [2**31, -1, -(2**31)], [0, 5, 2**31 - 1]),
    ],
)
def test_64_ranges_have_exact_ends(server, complete, name, wrong, right):
    for value in wrong:
        assert name in refused(complete("x", **{name: value}), name)
    for value in right:
        assert complete("x", **{name: value}).status_code == 200, value


# 65, 66 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [["a"] * 17, ["a"] * 10**5, "x" * 1_000_000, "é" * 513, [5], {"a": 1}, [None]])
def test_65_stop_strings_outside_the_limits(server, complete, stop):
    refused(complete("x", stop=stop), "stop")


def test_65_stop_strings_at_the_limits(server, complete):
    assert complete("x", stop=["a" * 1024] * 16).status_code == 200
    assert complete("x", stop="é" * 512).status_code == 200


@pytest.mark.parametrize("stop", ["你好", "好", "wor", "hello 你好 world", "o 你", "\u4f60"])
def test_66_stop_over_tokens_and_inside_characters(server, complete, text, stop):
    whole = "hello 你好 world"
    server.engine.script = Script(reply=says(text, whole))
    choice = complete("x", stop=[stop], max_tokens=50).json()["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_66_half_a_stop_string_at_the_end_is_sent(server, complete, text):
    server.engine.script = Script(reply=says(text, "the EN"))
    assert complete("x", stop=["END"]).json()["choices"][0]["text"] == "the EN"


# 67, 68 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xfe\xff\x00a"])
def test_67_bytes_that_are_not_utf8(server, http, bad):
    assert "UTF-8" in refused(post_raw(http, server, b'{"prompt":"a' + bad + b'"}'))


def test_67_byte_order_mark_is_not_json(server, http):
    answer = post_raw(http, server, b"\xef\xbb\xbf" + b'{"prompt":"a"}')
    assert "begins with a byte order mark (BOM): send UTF-8 without it" in refused(answer)


@pytest.mark.parametrize("field", ["prompt", "user", "stop", "cache_salt", "model", "bad_words", "whatever"])
@pytest.mark.parametrize("literal", [r"\ud800", r"a\udfffb", r"\ude00\ud83d", r"\u0000", r"\ufeff", r"\ud83d\ude00"])
def test_67_surrogates_nul_and_bom_never_crash(server, http, field, literal):
    prompt = "" if field == "prompt" else '"prompt":"x",'
    answer = post_raw(http, server, f'{{{prompt}"{field}":"{literal}"}}'.encode())
    assert answer.status_code in (200, 400, 404), answer.text


def test_67_lone_surrogate_in_a_chat_becomes_a_replacement(server, http, text):
    answer = post_raw(http, server, rb'{"messages":[{"role":"user","content":"a\ud800b"}]}', CHAT)
    assert answer.status_code == 200
    assert "a\ufffdb" in text.tokenizer.decode(server.engine.requests[0].prompt, skip_special_tokens=False)


def test_67_lone_surrogate_as_a_key(server, http):
    assert post_raw(http, server, rb'{"prompt":"x","\ud800":1}').status_code == 200
    assert post_raw(http, server, rb'{"prompt":"x","logit_bias":{"\ud800":1}}').status_code == 400


@pytest.mark.parametrize("cut", [1, 2])
def test_68_output_that_ends_inside_a_character(server, complete, stream, text, cut):
    tokens = text.tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(tokens) == 3
    server.engine.script = Script(reply=lambda request, index: tokens[:cut])
    assert complete("x").json()["choices"][0]["text"] == "\ufffd"
    events = stream(TEXT, {"prompt": "x"})
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["\ufffd"]


# 69, 70 ------------------------------------------------------------------------------------------------------------

WRONG_IDS = [-1, VOCAB, VOCAB + 1, 2**31, 2**63, 10**30, 1.0, 1.5, "5", True, None, [1], {}]


@pytest.mark.parametrize("value", WRONG_IDS)
def test_69_token_ids(server, complete, http, value):
    refused(complete([1, value]), "prompt")
    refused(complete([[1], [1, value]]), "prompt")
    refused(complete("x", stop_token_ids=[value]), "stop_token_ids")
    refused(http.post(server.url + "/detokenize", json={"tokens": [value]}), "tokens")
    assert not server.engine.requests


def test_69_the_head_width_counts_not_the_tokenizer(text, http):
    """A head that is wider, and one that is narrower than the tokenizer."""
    from dataclasses import replace

    for width in (VOCAB + 100, VOCAB - 100):
        with serving(text, model=replace(MODEL, head_width=width)) as server:
            url = server.url + TEXT
            assert http.post(url, json={"prompt": [width - 1]}).status_code == 200
            assert str(width - 1) in refused(http.post(url, json={"prompt": [width]}), "prompt")
            assert http.post(url, json={"prompt": "x", "top_k": width}).status_code == 200
            assert http.post(url, json={"prompt": "x", "top_k": width + 1}).status_code == 200
            assert server.engine.requests[-1].sampling.top_k == width, "all of them"
            refused(http.post(url, json={"prompt": "x", "logit_bias": {str(width): 1}}), "logit_bias")


def test_69_odd_lists(server, complete):
    for prompt in ([], [[]], [[1], []], [[[1]]], ["a", [1], 5], [None], [[1, 2], "x", None], {}, 5, None, True):
        refused(complete(prompt), "prompt")
    assert complete(["a", [1, 2]]).status_code == 200


def test_69_too_many_ids(server, complete):
    refused(complete("x", stop_token_ids=[1] * 1025), "stop_token_ids")
    refused(complete("x", bad_words=["a"] * 1025), "bad_words")
    refused(complete("x", bad_words=[""]), "bad_words")


@pytest.mark.parametrize(
    "bias",
    [{str(VOCAB): 1}, {"-1": 1}, {"x": 1}, {"1.0": 1}, {"": 1}, {"٣": 1}, {"5": True}, {"5": "1"}, {"5": None},
     {"1": 1, "01": 2}, [], "x"],
)  # fmt: skip
def test_70_logit_bias(server, complete, bias):
    refused(complete("x", logit_bias=bias), "logit_bias")


def test_70_a_bias_is_clamped_at_both_ends(server, complete):
    assert complete("x", logit_bias={"5": -1000, "6": 1000, "7": -3}).status_code == 200
    assert server.engine.requests[0].sampling.logit_bias == ((5, -100.0), (6, 100.0), (7, -3.0))


def test_70_too_many_biases(server, complete):
    refused(complete("x", logit_bias={str(i): -100 for i in range(1025)}))
    assert complete("x", logit_bias={str(i): -100 for i in range(1024)}).status_code == 200


def test_70_infinite_bias(server, http):
    refused(post_raw(http, server, b'{"prompt":"x","logit_bias":{"5":Infinity}}'))


def test_70_bias_against_every_token(text, http):
    from dataclasses import replace

    with serving(text, model=replace(MODEL, head_width=300)) as server:
        body = {"prompt": [5], "logit_bias": {str(i): -100 for i in range(300)}}
        assert "every token" in refused(http.post(server.url + TEXT, json=body), "logit_bias")


# 71, 72 ------------------------------------------------------------------------------------------------------------


def test_71_what_is_no_response_format(server, complete):
    for value in ({"type": "json_schema", "json_schema": {}}, {"type": "json_schema"}, {"type": 7}, {}, "text", True, []):
        refused(complete("x", response_format=value), "response_format")


@pytest.mark.parametrize(
    "body",
    [b"[" * 10_000, b'{"a":' * 10_000, b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
     b'{"prompt":"x","z":' + b"[" * 64 + b"]" * 64 + b"}"],
)  # fmt: skip
def test_72_deep_bodies(server, http, body):
    refused(post_raw(http, server, body))


def test_72_as_deep_as_allowed(server, http):
    assert post_raw(http, server, b'{"prompt":"x","z":' + b"[" * 63 + b"]" * 63 + b"}").status_code == 200


def test_72_brackets_in_strings_do_not_count(server, complete):
    assert complete("[{" * 90).status_code == 200


# 73, 74 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"max_tokens": -2}, {"max_tokens": 2, "min_tokens": 3}, {"max_tokens": None, "min_tokens": 17},
     {"min_tokens": 17}, {"max_tokens": 10**6, "min_tokens": CONTEXT}],
)  # fmt: skip
def test_73_min_and_max_tokens(server, complete, fields):
    refused(complete("x", **fields))


def test_73_chat_without_max_tokens_has_the_context(server, chat):
    message = refused(chat("x", min_tokens=CONTEXT), "min_tokens")
    assert str(CONTEXT) in message
    assert chat("x", min_tokens=CONTEXT - 100).status_code == 200


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, CONTEXT - 2, CONTEXT - 1])
def test_74_prompts_that_fit(server, complete, tokens):
    assert complete([5] * tokens, max_tokens=100).status_code == 200
    assert server.engine.requests[0].sampling.max_tokens == min(100, CONTEXT - tokens)


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1, 10**6])
def test_74_prompts_that_do_not(server, complete, tokens):
    answer = complete([5] * tokens)
    assert f"{tokens} tokens" in refused(answer, "prompt")
    assert str(CONTEXT - 1) in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_74_texts_that_do_not(server, complete, chat):
    assert "601 tokens" in refused(complete("a " * 600 + "b"), "prompt")
    began = time.monotonic()
    refused(complete("a" * 4_000_000), "prompt")
    refused(chat("word " * 1_000_000), "prompt")
    assert time.monotonic() - began < 5
    refused(complete(""), "prompt")


# 75, 76 ------------------------------------------------------------------------------------------------------------


def test_75_unknown_fields(server, complete, text, http):
    assert complete("x", foo=1, other={"a": 1}).status_code == 200
    with serving(text, ApiConfig(unknown_fields="refuse")) as strict:
        url = strict.url + TEXT
        answer = http.post(url, json={"prompt": "x", "fooo": 1})
        assert refused(answer, "fooo") == "unknown field 'fooo'"
        known = {"model": "smol", "prompt": "x", "user": "u", "stream": False, "stop": None, "suffix": None, "metadata": {}}
        assert http.post(url, json=known).status_code == 200


@pytest.mark.parametrize("field", INTERNAL)
@pytest.mark.parametrize("value", [None, {}, {"do_remote_prefill": True}, "10.0.0.1"])
def test_76_internal_fields_are_refused(server, complete, chat, field, value):
    for call in (complete, chat):
        answer = call("x", **{field: value})
        refused(answer, field)
        assert answer.json()["error"]["code"] == "internal_field"
    assert not server.engine.requests


def test_76_request_ids_of_clients_stay_outside(server, http):
    for name in ("mine", "a" * 5000, "tab\tinside", "héé"):
        headers = {"X-Request-Id": name.encode("latin-1"), "X-Internal-Handoff": "1"}
        answer = http.post(server.url + TEXT, json={"prompt": "x", "request_id": "forged"}, headers=headers)
        assert answer.status_code == 200
        assert (answer.headers["x-request-id"] == name) is (name == "mine")
        assert server.engine.requests[-1].id not in (name, "forged")
        assert len(server.engine.requests[-1].id) == 32


# 78, 79 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1//models", "/v1/models/../../config", "/%2e%2e/config", "/v1/models//", "/V1/models", "/v1"]
)
def test_78_path_tricks(server, path):
    answer = exchange(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 "), answer[:80]
    assert b'"error"' in answer


def test_78_absolute_form_is_only_a_path(server):
    answer = exchange(server, b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_78_method_override_does_nothing(server, http):
    answer = http.get(server.url + TEXT, headers={"X-HTTP-Method-Override": "POST"})
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 14\r\nContent-Length: 15\r\n",
        b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 14\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 1x\r\n",
        b"X-A: a\x00b\r\nContent-Length: 14\r\n",
        b"X A: b\r\nContent-Length: 14\r\n",
        b"X-A: a\rEvil: 1\r\nContent-Length: 14\r\n",
    ],
)
def test_78_two_lengths_and_broken_headers(server, headers):
    answer = exchange(
        server,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + headers + b"Connection: close\r\n\r\n" + b'{"prompt":"x"}',
    )
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert answer.count(b"HTTP/1.1") == 1
    assert not server.engine.requests


def test_78_header_value_with_a_line_break_is_not_echoed(server):
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\n b\r\nConnection: close\r\n\r\n"
    assert b"\r\nx-request-id: a\r\n b" not in exchange(server, request).lower()


def test_78_headers_too_large(server):
    line = b"X-Big: " + b"a" * 8000 + b"\r\n"
    answer = exchange(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + line * 9 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    answer = exchange(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_78_headers_are_counted_for_each_request_anew(text):
    with serving(text, ApiConfig(limits=Limits(header_bytes=500))) as server:
        request = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Some: " + b"a" * 200 + b"\r\n\r\n"
        last = request.replace(b"X-Some", b"Connection: close\r\nX-Some")
        assert exchange(server, request * 4 + last).count(b"HTTP/1.1 200 ") == 5


def test_79_compressed_bodies(server, http):
    bomb = gzip.compress(b" " * 10_000_000)
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity"):
        answer = post_raw(http, server, bomb, **{"content-encoding": encoding})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_encoding"
    assert post_raw(http, server, b'{"prompt":"x"}', **{"content-encoding": "identity"}).status_code == 200


def test_79_body_cap(server, http):
    big = b'{"prompt":"' + b"a" * (8 * 1024 * 1024) + b'"}'
    answer = post_raw(http, server, big)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close"), "the rest of the body is not wanted"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 99999999999999999\r\n\r\n"
    assert exchange(server, head).startswith(b"HTTP/1.1 413 ")


def test_79_body_cap_without_a_length(text):
    with serving(text, ApiConfig(limits=Limits(body_bytes=1000))) as server:
        chunk = b"c8\r\n" + b" " * 200 + b"\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        assert exchange(server, head + chunk * 6).startswith(b"HTTP/1.1 413 ")


# 81, 82, 83 --------------------------------------------------------------------------------------------------------


def test_82_many_messages(server, http):
    body = {"messages": [{"role": "user", "content": "x"}] * 10**5}
    began = time.monotonic()
    assert "100000" in refused(http.post(server.url + CHAT, json=body), "messages")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hi", [None], [5], [[]], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
     [{"role": "", "content": "x"}],
     [{"role": "a b", "content": "x"}], [{"role": "<|im_end|>", "content": "x"}], [{"role": 5, "content": "x"}],
     [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "text"}]}],
     [{"content": "x"}]],
)  # fmt: skip
def test_82_odd_messages(server, http, messages):
    refused(http.post(server.url + CHAT, json={"messages": messages}), "messages")


def test_82_defined_messages(server, http):
    for messages in (
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, {"role": "user", "content": ""}],
    ):
        assert http.post(server.url + CHAT, json={"messages": messages}).status_code == 200


def test_83_unknown_routes(server, http):
    for path in ("/admin", "/debug", "/swagger.json", "/docs", "/.env", "/static/chat.html"):
        answer = http.get(server.url + path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"


# Refusals of the engine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "status"),
    [("never_fits", 400), ("queue_full", 429), ("queue_tokens_full", 429), ("duplicate_id", 409), ("draining", 503),
     ("queued_too_long", 429), ("paused", 503), ("worker_gone", 503)],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [True, False])
def test_refusals_have_their_status_and_numbers(server, complete, reason, status, streamed):
    from baton.protocol.request import Refused

    server.engine.script = Script(refuse=Refused(reason, needed=77, limit=33))
    answer = complete("x", stream=streamed)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == reason
    if status in (429, 503):
        assert answer.headers["retry-after"] == "1"
    if reason in ("never_fits", "queue_full"):
        assert "77" in answer.json()["error"]["message"]
        assert "33" in answer.json()["error"]["message"]


def test_a_refusal_that_knows_when_to_come_back_says_so_in_whole_seconds():
    from baton.api.errors import as_api_error
    from baton.api.generate.engine_client import EngineRefused
    from baton.protocol.request import Refused

    for seconds, told in ((0.0, "1"), (0.2, "1"), (2.1, "3")):
        assert as_api_error(EngineRefused(Refused("queue_full"), seconds)).headers == {"retry-after": told}
    assert not as_api_error(EngineRefused(Refused("queue_full"))).headers, "then the server's own is told"
    assert not as_api_error(EngineRefused(Refused("never_fits"), 2.0)).headers


def test_unknown_model_is_404(server, http):
    for name in ("gpt-9", "x" * 10_000, ""):
        answer = http.post(server.url + TEXT, json={"model": name, "prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert len(answer.text) < 600
    refused(http.post(server.url + TEXT, json={"model": 5, "prompt": "x"}), "model")
    assert http.post(server.url + TEXT, json={"prompt": "x"}).status_code == 200


def test_errors_never_repeat_the_prompt(server, http):
    secret = "my-secret-words"
    for body in (
        {"prompt": secret, "n": secret},
        {"prompt": [secret, 5]},
        {"prompt": {"a": secret}},
        {"messages": [{"role": "user", "content": {"a": secret}}]},
        {"messages": [{"role": secret + " x", "content": secret}]},
        {"prompt": secret, "stop": [secret, 5]},
        {"prompt": "x", "cache_salt": secret + "\n"},
        {"prompt": "x", "max_tokens": secret},
    ):
        path = CHAT if "messages" in body else TEXT
        answer = http.post(server.url + path, json=body)
        assert answer.status_code == 400
        assert secret not in answer.text
