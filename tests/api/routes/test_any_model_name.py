"""--served-model-name '*': clients with a built-in name of a model are served; answers have the model's own name."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from api_fakes import MODEL, says, serving

from baton.cli.say import served_names

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "stream": False},
}


@pytest.mark.parametrize("any_name", [True, False])
def test_any_name_is_accepted(text, any_name):
    with serving(text, model=replace(MODEL, any_name=any_name)) as server:
        server.engine.answer = says(text, "Hello")
        for path, body in BODIES.items():
            got = httpx.post(server.url + path, json={**body, "model": "gpt-4o"}, timeout=30)
            assert got.status_code == (200 if any_name else 404), path
            if any_name and not path.startswith("/api/"):
                assert got.json()["model"] == MODEL.name
        assert httpx.post(server.url + "/v1/completions", json={"model": 5, "prompt": "Hi"}).status_code == 400
        listed = httpx.get(server.url + "/v1/models").json()["data"]
        assert [one["id"] for one in listed] == [*MODEL.names], "the star is no name"


def test_the_star_comes_last_and_is_nobody_s_name():
    assert served_names((), "owner/model") == ("owner/model",)
    assert served_names(("*",), "owner/model") == ("owner/model", "*")
    assert served_names(("*", "mine"), "owner/model") == ("mine", "*")
