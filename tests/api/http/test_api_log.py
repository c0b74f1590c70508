"""One line per request: what it was, what it cost, how it ended. Never what it said."""

from __future__ import annotations

import logging

import pytest
from api_fakes import FakeEngine, Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.errors import Unavailable
from baton.observe.logs import LineFormatter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRETS = ("secret-prompt", "secret-salt", "secret-key", "secret-user", "secret-stop", "secret-path", "secret-field")


@pytest.fixture
def lines(caplog):
    """The facts of the lines so far, of requests that have ended."""
    caplog.set_level(logging.INFO, "baton.api")

    def read(count: int = 1) -> list[dict]:
        def found() -> list[dict]:
            return [record.facts for record in caplog.records if record.getMessage() == "request"]

        assert eventually(lambda: len(found()) >= count), found()
        return found()

    return read


def test_a_whole_answer(server, complete, text, lines):
    server.engine.script = Script(reply=says(text, "one two"), cached_tokens=2)
    usage = complete("Once upon a time").json()["usage"]
    (line,) = lines()
    seconds = line.pop("seconds")
    assert 0 <= seconds < 60
    assert len(line.pop("id")) == 32
    assert line == {
        "method": "POST", "route": TEXT, "status": 200, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": 2,
        "completion_tokens": usage["completion_tokens"], "end": "stop",
    }  # fmt: skip


def test_a_stream_and_its_id(server, http, lines):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 3, "n": 2}
    answer = http.post(server.url + CHAT, json=body, headers={"X-Request-Id": "mine"})
    (line,) = lines()
    assert (line["id"], line["route"], line["completion_tokens"]) == ("mine", CHAT, 6)
    assert answer.headers["x-request-id"] == "mine"
    assert line["end"] == "length"


def test_a_refused_request(server, complete, lines):
    complete("x", n=99)
    (line,) = lines()
    assert (line["status"], "prompt_tokens" in line) == (400, False)


def test_an_engine_that_fails(server, complete, lines):
    server.engine.script = Script(end_error_after=1)
    complete("x")
    (line,) = lines()
    assert (line["status"], line["end"]) == (500, "engine_error")


def test_a_client_that_leaves(server, http, lines):
    server.engine.script = Script(silent=True)
    with pytest.raises(Exception, match="timed out"):
        http.post(server.url + TEXT, json={"prompt": "x"}, timeout=0.3)
    (line,) = lines()
    assert (line["status"], line["end"]) == (499, "disconnected")
    assert line["completion_tokens"] == 0


def test_a_stream_that_breaks(server, http, text, lines):
    server.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("the engine is gone"))
    http.post(server.url + TEXT, json={"prompt": "x", "stream": True})
    (line,) = lines()
    assert (line["status"], line["end"]) == (200, "failed")


def test_an_unknown_path_is_not_repeated(server, http, lines):
    http.get(server.url + "/secret-path")
    (line,) = lines()
    assert (line["route"], line["status"], line["end"]) == ("(none)", 404, "not_found")


def test_probes_are_not_worth_a_line(server, http, caplog):
    caplog.set_level(logging.DEBUG, "baton.api")
    for path in ("/health", "/live", "/ready", "/metrics"):
        http.get(server.url + path)
    server.engine.sick = Unavailable("stuck")
    http.get(server.url + "/health")
    assert eventually(lambda: len([r for r in caplog.records if r.getMessage() == "request"]) == 5)
    levels = [record.levelno for record in caplog.records if record.getMessage() == "request"]
    assert levels == [logging.DEBUG] * 4 + [logging.INFO]


def test_nothing_that_a_client_wrote_is_logged(text, http, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(text, ApiConfig(api_keys=("secret-key",))) as server:
        headers = {"Authorization": "Bearer secret-key", "Idempotency-Key": "secret-user"}
        fields = {"cache_salt": "secret-salt", "user": "secret-user", "stop": ["secret-stop"], "secret-field": 1}
        for script in (Script(), Script(fail_after=1), Script(end_error_after=1), Script(error=RuntimeError("secret-prompt"))):
            server.engine.script = script
            for stream in (False, True):
                body = {"prompt": "secret-prompt", "stream": stream, **fields}
                http.post(server.url + TEXT, json=body, headers=headers)
                http.post(server.url + TEXT, json={**body, "n": "secret-prompt"}, headers=headers)
        http.get(server.url + "/secret-path", headers={"Authorization": "Bearer secret-key-wrong"})
        http.post(server.url + "/secret-path/%0a", content=b"secret-prompt", headers=headers)
    formatter = LineFormatter("front", as_json=False)
    ours = [record for record in caplog.records if record.name.startswith(("baton", "uvicorn"))]
    logged = "\n".join(formatter.format(record) for record in ours)
    assert logged.count("request id=") >= 16
    for secret in SECRETS:
        assert secret not in logged


def test_a_failure_of_ours_is_logged_by_place(text, http, caplog):
    class Broken(FakeEngine):
        def stats(self):
            raise KeyError("secret-prompt")

    with serving(text) as server:
        server.app.state.front.engine = Broken()
        assert http.get(server.url + "/ready").status_code == 500
    line = LineFormatter("front", as_json=False).format(next(r for r in caplog.records if r.levelno >= logging.ERROR))
    assert "exception=KeyError" in line
    assert "routes/admin.py" in line
    assert "secret-prompt" not in line
