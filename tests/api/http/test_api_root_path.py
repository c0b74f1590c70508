"""--root-path: behind a proxy that leaves the path in, or cuts it off. And several names of one model."""

from __future__ import annotations

import httpx
import pytest
from api_fakes import MODEL, serving

from baton.api.app import ROUTES
from baton.api.config import ApiConfig
from baton.api.routes.cluster import cluster_route
from baton.config import ServeConfig
from baton.config.serve import OWN_PATHS
from baton.errors import InvalidConfig
from baton.protocol.control import InstanceReady
from baton.runtime.front.process import served_model


@pytest.fixture(scope="module")
def url(text):
    with serving(text, ApiConfig(api_keys=("k",), admin_api_keys=("a",)), root_path="/llm/one") as server:
        yield server.url


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
def test_every_route_is_there_with_the_path_and_without_it(url: str, prefix: str):
    key = {"authorization": "Bearer k"}
    assert httpx.get(f"{url}{prefix}/health").status_code == 200
    assert httpx.get(f"{url}{prefix}/v1/models", headers=key).json()["data"][0]["id"] == "smol"
    assert "<title>Baton</title>" in httpx.get(f"{url}{prefix}/", headers=key).text


def test_the_path_alone_is_the_page_and_part_of_it_is_nothing(url: str):
    key = {"authorization": "Bearer k"}
    assert "<title>Baton</title>" in httpx.get(f"{url}/llm/one", headers=key).text
    for path in ("/llm", "/llm/", "/llm/oneself/health", "/llm/one/llm/one/health"):
        assert httpx.get(url + path, headers=key).status_code == 404


def test_rights_are_the_same_below_it(url: str):
    for path in ("/config", "/llm/one/config", "/llm/one/v1/pause"):
        method = "POST" if "pause" in path else "GET"
        assert httpx.request(method, url + path).status_code == 401
        assert httpx.request(method, url + path, headers={"authorization": "Bearer k"}).status_code == 403
    assert httpx.get(f"{url}/llm/one/config", headers={"authorization": "Bearer a"}).status_code == 200


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/l l", "/\u00fc", "/..", "/llm/../x"])
def test_a_path_that_is_none_is_refused(path: str):
    with pytest.raises(InvalidConfig, match=r"root_path is .* it must begin with /"):
        ServeConfig(root_path=path)


@pytest.mark.parametrize("path", ["/v1", "/v1/one", "/api", "/health", "/config/x"])
def test_a_path_that_begins_like_a_route_is_refused(path: str):
    """With --root-path /v1 both /v1/models and /v1/v1/models could be meant by either."""
    with pytest.raises(InvalidConfig, match=rf"root_path is '{path}': /\w+ is the beginning of routes"):
        ServeConfig(root_path=path)


def test_the_first_parts_of_all_routes_are_known():
    routes = [*ROUTES, cluster_route(lambda: None)]
    firsts = {route.path.split("/")[1] for route in routes} | {"openai"}  # Azure's paths (azure_paths.py)
    assert firsts == set(OWN_PATHS)


def test_all_names_of_a_model_are_served_and_answers_have_the_first():
    ready = InstanceReady(blocks=1, block_size=16, slots=1, context_tokens=64, vocab_size=10, identity=b"i", plan={})
    model = served_model(ServeConfig(served_model_name=("one", "two", "three")), ready)
    assert model.names == ("one", "two", "three")
    assert MODEL.names == ("smol", "gpt-3.5-turbo")


def test_a_name_twice_is_refused():
    with pytest.raises(InvalidConfig, match="served_model_name has a name twice"):
        ServeConfig(served_model_name=("one", "two", "one"))


def test_any_of_the_names_is_taken(server, http):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for name in MODEL.names:
        answer = http.post(server.url + "/v1/chat/completions", json={"model": name, **body})
        assert answer.json()["model"] == "smol"
    assert http.post(server.url + "/v1/chat/completions", json={"model": "three", **body}).status_code == 404
