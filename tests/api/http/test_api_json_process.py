"""Large bodies are parsed in a process of their own: the same values and errors, and nobody waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from api_fakes import eventually

from baton.api.errors import ApiError
from baton.api.http.json_body import parse_object
from baton.api.http.json_process import INLINE_BYTES, JsonProcess
from baton.api.limits import Limits

FILL = "x" * INLINE_BYTES
LIMITS = Limits(json_values=5000)


@pytest.fixture(scope="module")
def process():
    process = JsonProcess(LIMITS, context_tokens=512)
    yield process
    process.close()


def outcome(parse, body: bytes):
    try:
        return parse(body)
    except ApiError as error:
        return error.http_status, str(error), error.param, error.code


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, null, true, "é"], "b": {"c": {}}}',
        '{"a": "\\ud83d\\ude00 \\ud800 \\udfff"}',
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": 1e400}',
        '{"a": Infinity}',
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        '{"a": ' + "[" * 100_000,
        '{"a": 1}{"b": 2}',
        '{"a": 1} x',
        "[1, 2]",
        "{" + ",".join(f'"k{i}": 1' for i in range(300)) + "}",
        '{"a": {' + ",".join(f'"k{i}": 1' for i in range(1025)) + "}}",
        '{"a": ' + "9" * 5000 + "}",
        '{"a": -9223372036854775808, "b": 18446744073709551615}',
        "",
        '{"a": "\n"}',
    ],
)
def test_values_and_errors_are_those_of_the_small_way(process, text):
    # The same text in both, once as it is and once made large by spaces, which JSON allows anywhere around a value.
    small, large = text.encode(), text.encode() + b" " * (INLINE_BYTES + 1)
    expected = outcome(lambda body: parse_object(body, LIMITS), large)
    assert outcome(process.parse, large) == expected
    if isinstance(expected, dict):
        assert parse_object(small, LIMITS) == expected


def test_bytes_that_are_no_utf_8_are_refused_there_too(process):
    body = json.dumps({"a": FILL}).encode() + b"\xff"
    assert outcome(process.parse, body) == outcome(lambda body: parse_object(body, LIMITS), body)


def test_an_int_of_more_than_64_bits_comes_through(process):
    value = process.parse(json.dumps({"a": 10**30, "b": [-(10**30)], "c": FILL}).encode())
    assert (value["a"], value["b"]) == (10**30, [-(10**30)])


def test_values_of_a_large_body_are_bounded_and_the_field_is_named(process):
    body = {"prompt": "a", "x": [[1] * 100] * 51, "fill": FILL}
    assert outcome(process.parse, json.dumps(body).encode()) == (
        400, "the body has more than 5000 values", "x", "too_many_values"
    )  # fmt: skip
    assert process.parse(json.dumps(body | {"x": [[1] * 100] * 49}).encode())["x"] == [[1] * 100] * 49


def test_a_prompt_of_too_many_ids_is_told_its_number_of_tokens(process):
    status, message, param, code = outcome(process.parse, json.dumps({"prompt": [7] * 600, "x": FILL}).encode())
    assert (status, param, code) == (400, "prompt", "context_length_exceeded")
    assert "600 tokens" in message


def test_small_bodies_need_no_process():
    process = JsonProcess(LIMITS, 512)
    assert process.parse(b'{"a": 1}') == {"a": 1}
    assert process.helper.pid is None


def test_a_child_that_was_killed_is_replaced_and_the_body_parsed():
    process = JsonProcess(LIMITS, 512)
    body = json.dumps({"a": FILL}).encode()
    assert process.parse(body) == {"a": FILL}
    os.kill(process.helper.pid, signal.SIGKILL)
    assert process.parse(body) == {"a": FILL}
    process.close()


def test_a_child_that_stands_still_is_killed_at_the_deadline_and_the_body_parsed_by_another():
    process = JsonProcess(Limits(prepare_seconds=2.0), 512)
    body = json.dumps({"a": FILL}).encode()
    process.helper.start()
    stopped = process.helper.pid
    assert outcome(process.parse, body) == {"a": FILL}
    os.kill(stopped, signal.SIGSTOP)
    assert outcome(process.parse, body) == {"a": FILL}
    assert eventually(lambda: not Path(f"/proc/{stopped}").exists())
    process.close()


def test_a_body_that_takes_too_much_memory_is_refused_and_the_next_is_not():
    """The bound follows from body_bytes; here it is too small for what comes."""
    process = JsonProcess(Limits(body_bytes=1), 512)
    body = b'{"a": [' + b",".join([b"[]"] * 3_500_000) + b"]}"
    assert outcome(process.parse, body)[:2] == (413, "the body takes too much memory to parse")
    assert process.parse(json.dumps({"a": FILL}).encode()) == {"a": FILL}
    process.close()


def test_the_child_is_bounded_and_told_no_secrets(process, monkeypatch):
    """It parses what anybody sends."""
    monkeypatch.setenv("BATON_SECRET", "hunter2")
    process.close()
    process.parse(json.dumps({"a": FILL}).encode())
    assert b"hunter2" not in Path(f"/proc/{process.helper.pid}/environ").read_bytes()
    limits = Path(f"/proc/{process.helper.pid}/limits").read_text()
    rows = {line[:26].strip(): line.split()[-2] for line in limits.splitlines()[1:]}
    assert rows["Max address space"] == str((256 + 64 * 8) * 1024 * 1024)
    assert (rows["Max core file size"], rows["Max file size"]) == ("0", "0")


def test_the_child_ends_with_its_parent():
    script = (
        "import os; from baton.api.http.json_process import *; process = JsonProcess(Limits(), 512); "
        "process.parse(b'{\"a\": 1}' + b' ' * INLINE_BYTES); print(process.helper.pid, flush=True); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=60, check=True)
    child = int(done.stdout)
    assert eventually(lambda: not Path(f"/proc/{child}/cmdline").exists(), 20)
    assert done.stderr == b""


def test_a_large_body_on_the_server_does_not_run_the_parser_there(server, http, monkeypatch):
    parsed = []
    import baton.api.http.json_process as module

    monkeypatch.setattr(module, "parse_object", lambda body, limits: parsed.append(len(body)) or parse_object(body, limits))
    answer = http.post(server.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "metadata": {"a": FILL}})
    assert answer.status_code == 200
    assert parsed == []
    assert http.post(server.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
    assert len(parsed) == 1
