"""Who may call which route, and what a web page of somebody else cannot make a browser do."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import threading

import httpx
import pytest
from api_fakes import MODEL, FakeEngine, eventually, serving

from baton.api.app import ROUTES, make_app
from baton.api.config import ApiConfig
from baton.api.errors import ApiError
from baton.api.foreign_paths import FOREIGN_PATHS
from baton.api.http.access import CrossSite, _is_local
from baton.api.http.server import make_server

CLIENT, ADMIN = "key-of-client", "key-of-admin"
ADMIN_ROUTES = [
    *(("GET", path) for path in ("/config", "/metrics", "/v1/orders")),
    *(("POST", path) for path in ("/v1/pause", "/v1/resume", "/v1/cache/clear", "/reset_prefix_cache")),
    *(("POST", path) for path in ("/v1/sleep", "/v1/wake", "/v1/weights")),
]
# Other ways to write a path. Servers and frameworks disagree about them, so they are tried on every admin route.
DISGUISES = [
    *("{}%0A", "{}%0a", "{}%0D%0A", "{}%00", "{}%20", "{}/", "{}//", "/{}", "//{}", "{}?x=1", "{}%3F", "{}%23", "{};x"),
    *("{}%2F", "{}/.", "{}/..", "{}%C2%85", "{}%E2%80%A8", "/%2e{}", "/x/..{}"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def raw_status(port: int, method: str, target: str, *headers: str, host: str = "localhost", body: bytes = b"") -> int:
    """Written by hand: no client library tidies up the path."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(10)
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return int(connection.recv(100)[9:12])


@pytest.fixture(scope="module")
def keyed(text):
    with serving(text, ApiConfig(api_keys=(CLIENT,), admin_api_keys=(ADMIN,))) as server:
        yield server


@pytest.fixture(scope="module")
def without_admin(text):
    with serving(text, ApiConfig(api_keys=(CLIENT, "another"))) as server:
        yield server


# Rights -------------------------------------------------------------------------------------------------------------


def test_the_right_is_a_property_of_the_route():
    assert {(method, r.path) for r in ROUTES if r.right == "admin" for method in r.methods - {"HEAD"}} == set(ADMIN_ROUTES)
    assert {route.path for route in ROUTES if route.right == "open"} == {"/health", "/live", "/ready"}


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_with_client_keys_alone_admin_routes_are_closed(without_admin, http, method, path):
    answer = http.request(method, without_admin.url + path, headers=bearer(CLIENT))
    assert answer.status_code == 403
    assert "--admin-api-key" in answer.json()["error"]["message"]
    assert without_admin.engine.snapshot.mode == "serving"


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_no_spelling_of_the_path_opens_an_admin_route(keyed, method, path, disguise):
    keyed.engine.snapshot.mode = "serving"
    status = raw_status(keyed.port, method, disguise.format(path), f"Authorization: Bearer {CLIENT}")
    assert status in (400, 403, 404), disguise
    assert keyed.engine.snapshot.mode == "serving"
    assert raw_status(keyed.port, method, disguise.format(path)) in (400, 401), disguise


@pytest.mark.parametrize("path", ["/v1/models%0A", "/health%0A", "/v1/models/a%00b", "/%7F", "/v1/models/%E2%80%A8"])
def test_control_characters_in_a_path_are_refused(keyed, path):
    assert raw_status(keyed.port, "GET", path, f"Authorization: Bearer {ADMIN}") == 400


def test_an_encoded_path_is_the_same_route(keyed):
    assert raw_status(keyed.port, "GET", "/v1%2Fpause", f"Authorization: Bearer {CLIENT}") == 403
    assert raw_status(keyed.port, "POST", "/v1/%70ause", f"Authorization: Bearer {CLIENT}") == 403


def test_without_any_key_this_machine_may_use_admin_routes(server, http):
    assert http.get(server.url + "/metrics").status_code == 200
    assert http.get(server.url + "/config").status_code == 200


def test_without_any_key_a_request_that_was_passed_on_may_not(server, http):
    for header in ("X-Forwarded-For", "Forwarded"):
        answer = http.post(server.url + "/v1/pause", headers={header: "203.0.113.9"})
        assert answer.status_code == 403
        assert "--admin-api-key" in answer.json()["error"]["message"]
    assert server.engine.snapshot.mode == "serving"


@pytest.mark.parametrize(
    ("peer", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.5", False), ("::2", False)],
)
def test_who_is_on_this_machine(peer, local):
    assert _is_local({"headers": [], "client": (peer, 1)}) is local


def test_an_admin_key_alone_leaves_the_rest_open(text, http):
    with serving(text, ApiConfig(admin_api_keys=(ADMIN,))) as server:
        assert http.get(server.url + "/v1/models").status_code == 200
        assert http.get(server.url + "/v1/models", headers=bearer("none")).status_code == 200
        assert http.get(server.url + "/metrics").status_code == 403
        assert http.get(server.url + "/metrics", headers=bearer(ADMIN)).status_code == 200


# The admin port -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_ports(text, **settings):
    """Public and admin listener of one server, as runtime/front/process.py makes them."""
    sockets = [socket.socket() for _ in range(2)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    public, admin = (sock.getsockname()[1] for sock in sockets)
    engine = FakeEngine()
    app = make_app(engine, text.tokenizer, text.chat_template, MODEL, ApiConfig(admin_port=admin, **settings))
    server = make_server(app, log_level="critical", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    assert eventually(lambda: server.started, 20)
    try:
        yield engine, f"http://127.0.0.1:{public}", f"http://127.0.0.1:{admin}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize("keys", [(), (CLIENT,)], ids=["no keys", "client keys"])
def test_83_admin_port_has_the_admin_routes_and_the_other_has_not(text, http, keys):
    with two_ports(text, api_keys=keys) as (engine, public, admin):
        client = bearer(CLIENT)
        for method, path in ADMIN_ROUTES:
            answer = http.request(method, public + path, headers=client)
            assert (answer.status_code, "--admin-port" in answer.text) == (404, True)
        for path in ("/v1/models", "/", "/version", "/nothing"):
            assert http.get(admin + path, headers=client).status_code == 404
        assert http.get(public + "/v1/models", headers=client).status_code == 200
        assert http.get(public + "/health").status_code == http.get(admin + "/health").status_code == 200
        assert http.post(admin + "/v1/pause", headers=client).status_code == 200
        assert engine.snapshot.mode == "paused"  # one front behind both
        assert http.get(public + "/ready").status_code == 503


def test_83_admin_port_asks_for_the_admin_key_where_there_is_one(text, http):
    with two_ports(text, api_keys=(CLIENT,), admin_api_keys=(ADMIN,)) as (_, public, admin):
        assert http.get(admin + "/metrics").status_code == 401
        assert http.get(admin + "/metrics", headers=bearer(CLIENT)).status_code == 403
        assert http.get(admin + "/metrics", headers=bearer(ADMIN)).status_code == 200
        assert http.get(public + "/metrics", headers=bearer(ADMIN)).status_code == 404


def test_83_the_host_header_does_not_choose_the_port(text, http):
    with two_ports(text) as (_, public, admin):
        assert http.get(public + "/metrics", headers={"Host": admin.removeprefix("http://")}).status_code == 404


# Foreign pages ------------------------------------------------------------------------------------------------------


def test_a_foreign_page_cannot_post_with_the_browsers_basic_password(keyed, http):
    """A browser sends no Sec-Fetch-Site to http addresses other than localhost, and needs no leave for text/plain."""
    basic = "Basic " + base64.b64encode(b"any:" + CLIENT.encode()).decode()
    headers = {"Authorization": basic, "Origin": "http://evil.example", "Content-Type": "text/plain"}
    answer = http.post(keyed.url + "/v1/completions", content=b'{"prompt":"x"}', headers=headers)
    assert answer.status_code == 403
    assert "--allowed-origins" in answer.json()["error"]["message"]
    assert not keyed.engine.requests


def test_only_answers_that_a_cache_may_keep_vary_by_origin_for_clients_without_one(server, http):
    """They are answered without the middleware, which would look at each event of a stream."""
    body = {"model": "m", "prompt": [1], "max_tokens": 1}
    assert "vary" not in http.post(server.url + "/v1/completions", json=body).headers
    assert http.get(server.url + "/v1/models").headers["vary"] == "Origin"
    named = http.post(server.url + "/v1/completions", json=body, headers={"Origin": "http://localhost:3000"})
    assert named.headers["access-control-allow-origin"] == "http://localhost:3000"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://", "http://[", "https://x y"])
def test_a_foreign_page_cannot_pause_an_open_server(server, http, origin):
    assert http.post(server.url + "/v1/pause", headers={"Origin": origin}).status_code == 403
    assert server.engine.snapshot.mode == "serving"


def test_own_pages_and_programs_may_post(server, http):
    for headers in ({}, {"Origin": server.url}, {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}):
        assert http.post(server.url + "/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200


def test_a_page_behind_a_proxy_with_tls_may_post(text, http):
    with serving(text, ApiConfig(allowed_hosts=("ui.example",))) as server:
        headers = {"Host": "ui.example", "Origin": "https://ui.example"}
        assert http.post(server.url + "/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/js"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/abort", "/v1/pause"])
def test_a_body_must_be_called_json(server, http, kind, path):
    answer = http.post(server.url + path, content=b'{"prompt":"x"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert not server.engine.requests
    assert server.engine.snapshot.mode == "serving"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_kinds_of_json(server, http, kind):
    answer = http.post(server.url + "/v1/completions", content=b'{"prompt":"x"}', headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_a_body_in_chunks_must_be_called_json_too(server):
    chunked = b"10\r\n" + b'{"prompt":"xyz"}' + b"\r\n0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(10)
        connection.sendall(head + chunked)
        assert connection.recv(100).startswith(b"HTTP/1.1 415 ")


def test_no_body_needs_no_type(server, http):
    assert http.post(server.url + "/v1/resume").status_code == 200


def test_allowed_origins_may_read_and_send_headers_of_their_own(text, http):
    with serving(text, ApiConfig(allowed_origins=("https://ui.example",), api_keys=(CLIENT,))) as server:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
        preflight = http.options(server.url + "/v1/completions", headers={"Origin": "https://ui.example", **asked})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://ui.example")
        assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
        answer = http.get(server.url + "/v1/models", headers={"Origin": "https://ui.example", **bearer(CLIENT)})
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"
        evil = http.options(server.url + "/v1/completions", headers={"Origin": "https://evil.example", **asked})
        assert "access-control-allow-origin" not in evil.headers


# Host ---------------------------------------------------------------------------------------------------------------


def ours(config: ApiConfig, host: str) -> bool:
    scope = {"method": "GET", "headers": [(b"host", host.encode())]}
    try:
        CrossSite(config).require(scope, trusted_host=False)
    except ApiError as error:
        return (error.http_status, "--allowed-hosts" in str(error)) != (421, True)
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5:8000", "localhost."]
)
def test_addresses_and_loopback_names_are_ours(host):
    assert ours(ApiConfig(), host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example", "evillocalhost", "x", "[x]:1"]
)
def test_rebound_names_are_not(host):
    assert not ours(ApiConfig(), host)


def test_names_of_a_server_for_the_network():
    config = ApiConfig(host="0.0.0.0", allowed_hosts=("llm.example", "*.inner.example"))
    for host in ("llm.example", "LLM.example:8000", "a.inner.example", "gpu-box:8000", "10.0.0.5", socket.gethostname()):
        assert ours(config, host)
    for host in ("evil.example", "inner.example.evil", "llm.example.evil.example", "evilinner.example"):
        assert not ours(config, host)
    assert ours(ApiConfig(host="llm.example"), "llm.example:8000")
    assert ours(ApiConfig(allowed_hosts=("*",)), "any.example")


def test_a_rebound_name_is_refused_by_a_server_without_keys(server):
    body = json.dumps({"prompt": "x"}).encode()
    kind = "Content-Type: application/json"
    assert raw_status(server.port, "POST", "/v1/completions", kind, host="evil.example", body=body) == 421
    origin = "Origin: http://evil.example"
    assert raw_status(server.port, "POST", "/v1/pause", origin, host="evil.example") == 421
    assert raw_status(server.port, "GET", "/", host="evil.example") == 421
    assert not server.engine.requests
    assert server.engine.snapshot.mode == "serving"


def test_a_bearer_key_works_under_any_name_but_a_browsers_password_does_not(keyed):
    """No page can add a key that it does not know; a browser adds a password by itself."""
    assert raw_status(keyed.port, "GET", "/v1/models", f"Authorization: Bearer {CLIENT}", host="llm.example") == 200
    basic = base64.b64encode(b"any:" + CLIENT.encode()).decode()
    assert raw_status(keyed.port, "GET", "/v1/models", f"Authorization: Basic {basic}", host="llm.example") == 421


def test_health_answers_under_any_name(server):
    assert raw_status(server.port, "GET", "/health", host="probe.internal.example") == 200


def test_two_host_headers_are_refused(server):
    assert raw_status(server.port, "GET", "/v1/models", "Host: evil.example") == 400


# 404, 405, slashes --------------------------------------------------------------------------------------------------


def test_405_names_what_is_allowed(server, http):
    answer = http.get(server.url + "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/completions does not take GET, it takes POST"
    assert http.post(server.url + "/v1/models").headers["allow"] == "GET, HEAD"


def test_404_names_routes_that_exist(server, http):
    answer = http.get(server.url + "/v1/nothing")
    assert answer.status_code == 404
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_404_of_another_servers_path_names_the_route_to_use(server, http):
    answer = http.post(server.url + "/generate", json={"text": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such route: use POST /v1/completions"
    assert "GET /config" in http.get(server.url + "/props").json()["error"]["message"]
    assert "LoRA" in http.post(server.url + "/v1/load_lora_adapter", json={}).json()["error"]["message"]


def test_a_route_named_in_a_404_exists_and_the_path_itself_does_not(server):
    routes = {(method, route.path) for route in server.app.routes for method in route.methods}
    assert not {route for _, route in routes} & {*FOREIGN_PATHS}
    named = {found for words in FOREIGN_PATHS.values() for found in re.findall(r"(GET|POST) (/[a-z0-9_/.-]+)", words)}
    assert len(named) > 10
    assert not named - routes


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/models/smol/", "/metrics/"])
def test_a_trailing_slash_is_the_same_route(server, http, path):
    assert http.get(server.url + path).status_code == 200


def test_a_trailing_slash_on_a_post(server, http):
    assert http.post(server.url + "/v1/completions/", json={"prompt": "x"}).status_code == 200


def test_every_answer_has_a_request_id(keyed):
    for path in ("/health", "/v1/models", "/nothing", "/v1/pause%0A"):
        with httpx.Client() as client:
            assert client.get(keyed.url + path).headers["x-request-id"]


def test_environment_does_not_change_the_server(text, monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setenv("WEB_CONCURRENCY", "7")
    app = make_app(FakeEngine(), text.tokenizer, text.chat_template, MODEL, ApiConfig())
    config = make_server(app).config
    assert (config.workers, config.proxy_headers, config.forwarded_allow_ips) == (1, False, "")


# Names that public DNS cannot have, and pages of this machine --------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "host.docker.internal:8000", "gpu-box.local", "box.lan", "baton.default.svc.cluster.local:80", "baton.default.svc",
        "HOST.docker.INTERNAL.", "nas.home.arpa",
    ],
)  # fmt: skip
def test_names_that_public_dns_cannot_have_are_ours(host):
    assert ours(ApiConfig(), host)
    assert ours(ApiConfig(host="0.0.0.0"), host)


@pytest.mark.parametrize("host", ["local", "internal", "x.internal.example", "evillocal", "x.locals", "lan.example", "x.arpa"])
def test_names_that_only_look_like_them_are_not(host):
    assert not ours(ApiConfig(), host)


def test_an_app_of_another_port_of_this_machine_may_call_a_server_without_keys(text, http):
    with serving(text) as server:
        for origin in ("http://localhost:3000", "http://127.0.0.1:5173", "https://localhost", "http://[::1]:8080"):
            headers = {"Origin": origin, "Sec-Fetch-Site": "same-site"}
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            preflight = http.options(server.url + "/v1/completions", headers={**headers, **asked})
            assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin)
            answer = http.post(server.url + "/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost.evil.example", "http://evil.example", "null", "http://127.0.0.1.nip.io", "http://192.168.1.5:3000"],
)
def test_a_page_of_elsewhere_may_not(text, http, origin):
    with serving(text) as server:
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        assert http.post(server.url + "/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 403
        assert "access-control-allow-origin" not in http.get(server.url + "/v1/models", headers=headers).headers


def test_an_app_of_this_machine_may_not_call_admin_routes(text, http):
    """Without admin keys these answer this machine only; a page that it shows is not its user."""
    with serving(text) as server:
        headers = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}
        for method, path in (("POST", "/v1/pause"), ("POST", "/v1/sleep"), ("GET", "/config"), ("GET", "/metrics")):
            answer = http.request(method, server.url + path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin"), path
        assert server.engine.snapshot.mode == "serving"
        assert http.post(server.url + "/v1/resume").status_code == 200


@pytest.mark.parametrize("settings", [{"api_keys": ("k",)}, {"admin_api_keys": ("k",)}, {"host": "0.0.0.0"}])
def test_pages_of_this_machine_are_foreign_where_there_are_keys_or_other_machines(settings):
    scope = {"method": "POST", "headers": [(b"host", b"localhost:8000"), (b"origin", b"http://localhost:3000")]}
    with pytest.raises(ApiError, match="allowed-origins"):
        CrossSite(ApiConfig(**settings)).require(scope, trusted_host=False)
    CrossSite(ApiConfig()).require(scope, trusted_host=False)


def test_no_host_name_lets_a_local_page_read_admin_routes(text, http):
    """The answer has the CORS header of the page whatever Host says, so the page could read it."""
    with serving(text, ApiConfig(allowed_hosts=("llm.example",))) as server:
        for host in ("llm.example", "box.local", "localhost"):
            answer = http.get(server.url + "/config", headers={"Host": host, "Origin": "http://localhost:3000"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin"), host
            assert http.get(server.url + "/config", headers={"Host": host}).status_code == 200


def test_a_proxy_s_name_is_that_of_a_server_for_others():
    config = ApiConfig(allowed_hosts=("llm.example",))
    scope = {"method": "POST", "headers": [(b"host", b"llm.example"), (b"origin", b"http://localhost:3000")]}
    with pytest.raises(ApiError, match="allowed-origins"):
        CrossSite(config).require(scope, trusted_host=False)
