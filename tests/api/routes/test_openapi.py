"""/openapi.json says what is read: held against the routes and against the reader of fields."""

from __future__ import annotations

import pytest
from api_fakes import MODEL

from baton.api.app import ROUTES
from baton.api.config import ApiConfig
from baton.api.fields import Fields
from baton.api.openai.known_fields import CHAT_ONLY, COMPLETION_ONLY, HARMLESS, INTERNAL, UNSUPPORTED
from baton.api.openai.schemas import Schema
from baton.api.routes.openapi import BODIES, CHAT, COMPLETION


def test_every_route_is_in_it(server, http):
    document = http.get(server.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    assert set(paths) == {route.path.replace(":path}", "}") for route in ROUTES}
    assert set(paths["/v1/responses/{id}"]) == {"get", "delete"}
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["temperature"] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert body["properties"]["n"] == {"type": "integer", "minimum": 1, "maximum": 16}
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(set(names)) == len(names)
    assert paths["/health"]["get"]["security"] == []


def test_bodies_are_of_routes_that_there_are():
    assert set(BODIES) <= {route.path for route in ROUTES if "POST" in (route.methods or ())}


@pytest.mark.parametrize(("body", "described"), [({"messages": []}, CHAT), ({"prompt": "x"}, COMPLETION)])
def test_fields_are_those_that_are_read(monkeypatch, body, described):
    read: set[str] = set()
    raw, know = Fields.raw, Fields.know
    monkeypatch.setattr(Fields, "raw", lambda self, name: (read.add(name), raw(self, name))[1])
    monkeypatch.setattr(Fields, "know", lambda self, names: (read.update(names), know(self, names))[1])
    schema = Schema(MODEL, ApiConfig())
    schema.chat(body) if "messages" in body else schema.completion(body)
    refused = {*UNSUPPORTED, *HARMLESS, *INTERNAL}
    assert read - refused - set(described) == (
        set(COMPLETION_ONLY) if "messages" in body else set(CHAT_ONLY)
    )  # those are read of the other kind too, to refuse them
    assert set(described) - read - {"timeout"} == set()
