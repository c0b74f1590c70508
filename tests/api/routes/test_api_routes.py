"""The other routes: models, tokenize, health, control, config, the page; keys."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import threading
import time

import pytest
from api_fakes import CONTEXT, MODEL, FakeEngine, serving

from baton import __version__
from baton.api.app import make_app
from baton.api.config import ApiConfig, ServedModel
from baton.api.routes import admin
from baton.errors import InvalidConfig, Unavailable
from baton.protocol.request import Refused

KEYS = ("key-of-alice", "key-of-bob")


@pytest.fixture(scope="module")
def keyed(text):
    with serving(text, ApiConfig(api_keys=KEYS, admin_api_keys=("key-of-admin",))) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_models(server, http):
    data = http.get(server.url + "/v1/models").json()["data"]
    assert [entry["id"] for entry in data] == ["smol", "gpt-3.5-turbo"]
    assert data[0]["max_model_len"] == CONTEXT
    assert http.get(server.url + "/v1/models/smol").json()["root"] == "smol"
    answer = http.get(server.url + "/v1/models/some/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_alias_is_served_under_the_name(server, http):
    answer = http.post(server.url + "/v1/completions", json={"model": "gpt-3.5-turbo", "prompt": "x"})
    assert answer.json()["model"] == "smol"
    told = http.get(server.url + "/v1/models/gpt-3.5-turbo").json()
    assert (told["id"], told["root"]) == ("gpt-3.5-turbo", "smol")


def test_tokenize_and_back(server, http, text):
    answer = http.post(server.url + "/tokenize", json={"prompt": "Hello é", "return_token_strs": True}).json()
    ids = text.tokenizer.encode("Hello é")
    assert answer["tokens"] == ids
    assert (answer["count"], answer["max_model_len"]) == (len(ids), CONTEXT)
    assert len(answer["token_strs"]) == len(ids)
    assert http.post(server.url + "/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello é"}


def test_tokenize_a_chat(server, http, text):
    messages = [{"role": "user", "content": "Hi"}]
    answer = http.post(server.url + "/tokenize", json={"messages": messages}).json()
    rendered = text.chat_template.render(messages)
    assert answer["tokens"] == text.tokenizer.encode(rendered, add_special_tokens=False, parse_special=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [49152]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {}),
        ("/v1/abort", {}),
        ("/v1/pause", {"drain_seconds": -1}),
    ],
)
def test_bad_bodies_of_the_small_routes(server, http, path, body):
    assert http.post(server.url + path, json=body).status_code == 400


def test_health_is_a_round_trip(server, http):
    assert http.get(server.url + "/health").status_code == 200
    server.engine.sick = Unavailable("no step for 60 s")
    answer = http.get(server.url + "/health")
    assert answer.status_code == 503
    assert http.get(server.url + "/ready").status_code == 503
    assert http.get(server.url + "/live").status_code == 200


def test_a_server_that_ends_soon_is_not_ready_and_still_answers(server, http, complete):
    front = server.app.state.front
    front.leaving = True
    try:
        answer = http.get(server.url + "/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert http.get(server.url + "/health").status_code == 200
        assert complete("x").status_code == 200
    finally:
        front.leaving = False
    assert http.get(server.url + "/ready").status_code == 200


def test_an_instance_of_a_cluster_is_ready_while_it_has_a_router(text, http):
    with serving(text, ApiConfig(routers=("dns://routers:8100",))) as server:
        answer = http.get(server.url + "/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_router")
        assert [http.get(server.url + path).status_code for path in ("/live", "/health")] == [200, 200]
        server.engine.snapshot.router_refusal = "weights 12ab instead of 34cd"
        assert http.get(server.url + "/ready").json()["error"]["message"].endswith("is open: weights 12ab instead of 34cd")
        server.engine.snapshot.routers = 1
        assert http.get(server.url + "/ready").status_code == 200


def test_sleep_wake_and_other_weights(server, http):
    assert http.post(server.url + "/v1/sleep", json={"drain_seconds": 2}).json() == {"mode": "asleep"}
    assert server.engine.paused_with[-1] == 2.0
    assert http.get(server.url + "/ready").status_code == 503
    assert http.post(server.url + "/v1/wake").json() == {"mode": "serving"}
    answer = http.post(server.url + "/v1/weights", json={"path": "/models/other", "drain_seconds": 3})
    assert (answer.status_code, server.engine.loaded, server.engine.paused_with[-1]) == (200, "/models/other", 3.0)
    assert answer.json()["fingerprint"].startswith("fp_")
    for body, word in (({"path": "/models/broken"}, "not a model"), ({}, "path"), ({"path": 7}, "path")):
        answer = http.post(server.url + "/v1/weights", json=body)
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]


def test_an_order_that_outlasts_its_route_is_202_and_goes_on(server, http, monkeypatch):
    monkeypatch.setattr(admin, "_LOAD_SECONDS_MAX", 0.05)
    gate = threading.Event()

    async def slow() -> None:
        await asyncio.to_thread(gate.wait, 20)
        server.engine.loaded = "/models/slow"

    server.engine.load_weights = lambda model, drain: slow()
    try:
        answer = http.post(server.url + "/v1/weights", json={"path": "/models/slow", "drain_seconds": 0})
        assert (answer.status_code, answer.json()["state"]) == (202, "running")
        assert http.post(server.url + "/v1/sleep", json={}).status_code == 409
    finally:
        gate.set()
    while (order := http.get(server.url + "/v1/orders").json()["orders"][0])["state"] == "running":
        time.sleep(0.01)
    assert order == {"order": answer.json()["order"], "kind": "weights", "state": "done", "error": None}
    assert server.engine.loaded == "/models/slow"


def test_pause_and_resume(server, http, complete):
    assert http.post(server.url + "/v1/pause", json={"drain_seconds": 2}).json() == {"mode": "paused"}
    assert server.engine.paused_with[-1] == 2.0
    for body, drain in (({"drain_seconds": 0}, 0.0), ({"drain_seconds": None}, None), ({}, None)):
        assert http.post(server.url + "/v1/pause", json=body).status_code == 200
        assert server.engine.paused_with[-1] == drain, "0 is at once, and nothing is as long as it takes"
    assert http.get(server.url + "/ready").status_code == 503
    assert http.get(server.url + "/health").status_code == 200
    server.engine.script.refuse = Refused("paused")
    assert complete("x").status_code == 503
    server.engine.script.refuse = None
    assert http.post(server.url + "/v1/resume").json() == {"mode": "serving"}
    assert http.get(server.url + "/ready").status_code == 200


def test_version_and_config_without_secrets(server, http):
    assert http.get(server.url + "/version").json() == {"version": __version__}
    shown = http.get(server.url + "/config").json()
    assert shown["api"]["limits"]["body_bytes"] == 8 * 1024 * 1024
    assert shown["model"]["name"] == "smol"


def test_config_counts_keys_and_does_not_show_them(keyed, http):
    answer = http.get(keyed.url + "/config", headers=bearer("key-of-admin"))
    assert answer.json()["api"]["api_keys"] == 2
    assert "key-of" not in answer.text
    assert "key-of" not in repr(keyed.app.state.front.config)


# Keys --------------------------------------------------------------------------------------------------------------


def test_every_route_but_three_needs_a_key(keyed, http):
    paths = [route.path for route in keyed.app.routes]
    assert len(paths) == 47
    for path in [*paths, "/nothing/here", "/docs", "/health/", "//health", "/health//", "/health/x"]:
        for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD"):
            status = http.request(method, keyed.url + path).status_code
            if path in ("/health", "/live", "/ready", "/health/"):
                assert status in (200, 405)
            else:
                assert status == 401, (method, path)


def test_right_key(keyed, http):
    assert http.get(keyed.url + "/v1/models", headers=bearer(KEYS[0])).status_code == 200
    assert http.get(keyed.url + "/v1/models", headers={"authorization": "bearer  " + KEYS[1]}).status_code == 200


def test_admin_routes_need_an_admin_key(keyed, http):
    for method, path in (
        ("GET", "/config"),
        ("GET", "/metrics"),
        ("GET", "/v1/orders"),
        ("POST", "/v1/pause"),
        ("POST", "/v1/resume"),
        ("POST", "/v1/sleep"),
        ("POST", "/v1/wake"),
    ):
        assert http.request(method, keyed.url + path, headers=bearer(KEYS[0])).status_code == 403
        assert http.request(method, keyed.url + path, headers=bearer("key-of-admin")).status_code == 200


def test_77_bad_keys_are_401_and_never_logged(keyed, http, caplog):
    caplog.set_level(logging.DEBUG)
    wrong = [
        "",
        "Bearer",
        "Bearer wrong-key-x",
        "Basic !!!",
        "key-of-alice",
        f"Bearer {KEYS[0]} {KEYS[0]}",
        "Bearer " + "k" * 30_000,
    ]
    for value in wrong:
        answer = http.get(keyed.url + "/v1/models", headers={"Authorization": value})
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert http.get(keyed.url + "/v1/models", headers={"Authorization": "Bearer " + "k" * 1_000_000}).status_code == 431
    twice = [("Authorization", f"Bearer {KEYS[0]}"), ("Authorization", f"Bearer {KEYS[0]}")]
    assert http.get(keyed.url + "/v1/models", headers=twice).status_code == 401
    assert not any("wrong-key-x" in record.getMessage() or "key-of" in record.getMessage() for record in caplog.records)


def test_77_compare_is_over_digests_of_all_keys(monkeypatch):
    from baton.api.http import auth

    seen = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or real(a, b))
    keys = auth.Keys(ApiConfig(api_keys=KEYS, admin_api_keys=("adm",)))
    assert keys.caller([(b"authorization", b"Bearer " + KEYS[0].encode())]) is not None
    assert keys.caller([(b"authorization", b"Bearer no\x00pe")]) is None
    assert seen == [(32, 32)] * 6


def test_browser_may_use_basic_but_only_from_our_own_pages(keyed, http):
    value = "Basic " + base64.b64encode(b"any:" + KEYS[0].encode()).decode()
    assert http.get(keyed.url + "/", headers={"Authorization": value}).status_code == 200
    assert http.get(keyed.url + "/").headers["www-authenticate"].startswith("Basic")
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401)):
        headers = {"Authorization": value, "Sec-Fetch-Site": site}
        assert http.get(keyed.url + "/v1/models", headers=headers).status_code == status


def test_pages_of_other_origins_may_not_post(server, http):
    headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://elsewhere.example"}
    assert http.post(server.url + "/v1/pause", headers=headers).status_code == 403
    assert not server.engine.requests


def test_allowed_origin_may(text, http):
    with serving(text, ApiConfig(allowed_origins=("https://ui.example",), api_keys=("k1",))) as server:
        headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://ui.example"}
        preflight = http.options(
            server.url + "/v1/completions",
            headers={**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"},
        )
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
        answer = http.post(server.url + "/v1/completions", json={"prompt": "x"}, headers={**headers, **bearer("k1")})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"


def test_80_salt_is_bound_to_the_key(keyed, http):
    keyed.engine.requests.clear()
    for key, salt in ((KEYS[0], None), (KEYS[1], None), (KEYS[0], "guess"), (KEYS[1], "guess")):
        body = {"prompt": "x", "cache_salt": salt}
        assert http.post(keyed.url + "/v1/completions", json=body, headers=bearer(key)).status_code == 200
    salts = [request.salt for request in keyed.engine.requests]
    assert len(set(salts)) == 4
    assert all(len(salt) == 32 for salt in salts)


def test_80_odd_salts(server, complete):
    for salt in ("x" * 1_000_000, "é" * 200, "nul\x00", "line\n", 5, ["a"]):
        answer = complete("x", cache_salt=salt)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"
    assert complete("x", cache_salt="日本語 ok").status_code == 200


def test_another_tenants_request_cannot_be_aborted(keyed, http):
    front = keyed.app.state.front
    from baton.api.http.auth import Keys

    keys = Keys(front.config)
    alice, bob = (keys.caller([(b"authorization", b"Bearer " + key.encode())]).tenant for key in KEYS)
    with front.live.admitted(alice, ("name",)) as live:
        live.engine_ids.append("e1")
        assert front.live.abort(bob, "name") == 0
        assert front.live.abort(alice, "name") == 1
    assert [abort[0] for abort in keyed.engine.aborts] == ["e1"]


def test_health_checks_share_one_round_trip(text):
    engine = FakeEngine()

    async def slow_ping(timeout_seconds: float) -> None:
        engine.pings += 1
        await asyncio.sleep(0.05)

    engine.ping = slow_ping
    front = make_app(engine, text.tokenizer, text.chat_template, MODEL, ApiConfig()).state.front

    async def many() -> None:
        await asyncio.gather(*(front.ping() for _ in range(50)))

    asyncio.run(many())
    assert engine.pings == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: ApiConfig(api_keys=("",)),
        lambda: ApiConfig(api_keys=(" spaced ",)),
        lambda: ApiConfig(api_keys=("a", "b"), admin_api_keys=("a",)),
        lambda: ApiConfig(allowed_origins=("https://ui.example/path",)),
        lambda: ApiConfig(allowed_origins=("ui.example",)),
        lambda: ApiConfig(allowed_hosts=("name:8000",)),
        lambda: ApiConfig(allowed_hosts=("http://name",)),
        lambda: ServedModel(name="", context_tokens=10, head_width=10),
        lambda: ServedModel(name="x", context_tokens=10, head_width=10, sampling_defaults={"temperature": 9.0}),
        lambda: ServedModel(name="x", context_tokens=10, head_width=10, sampling_defaults={"n": 2}),
    ],
)
def test_bad_config(make):
    with pytest.raises(InvalidConfig):
        make()


# The page ----------------------------------------------------------------------------------------------------------


def test_chat_page_fetches_nothing_from_elsewhere(server, http):
    answer = http.get(server.url + "/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    without_namespace = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in without_namespace
    assert "https://" not in without_namespace
    assert len(answer.content) < 64 * 1024


def test_the_cache_is_cleared_on_the_tiers_that_are_named(server, http):
    assert http.post(server.url + "/v1/cache/clear").json() == {"cleared": ["device", "host"]}
    assert server.engine.cleared == (True, True)
    assert http.post(server.url + "/reset_prefix_cache", json={"tiers": ["device"]}).json() == {"cleared": ["device"]}
    assert server.engine.cleared == (True, False)
    for wrong in ("device", [], ["storage"], [1]):
        assert http.post(server.url + "/v1/cache/clear", json={"tiers": wrong}).status_code == 400


# An instance of a cluster


def test_an_instance_of_a_cluster_generates_nothing_for_clients_and_says_where_its_router_is(text, http):
    config = ApiConfig(routers=("tcp://router:8100",), chat_page=False)
    with serving(text, config) as server:
        server.engine.snapshot.routers = 1
        for path in ("/health", "/live", "/ready", "/version", "/metrics", "/config"):
            assert http.get(server.url + path).status_code == 200
        assert http.post(server.url + "/v1/pause", json={}).status_code == 200
        assert http.post(server.url + "/v1/resume").status_code == 200
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/abort"):
            answer = http.post(server.url + path, json={"model": "smol", "prompt": "x"})
            assert answer.status_code == 404
            assert "tcp://router:8100" in answer.json()["error"]["message"]
        assert http.get(server.url + "/").status_code == http.get(server.url + "/v1/models").status_code == 404
