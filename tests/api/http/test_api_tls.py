"""https with a certificate that is made here; client certificates; files that cannot be used."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from api_fakes import eventually, says, serving

from baton.api.config import ApiConfig
from baton.api.http.tls import tls_context
from baton.api.limits import Limits
from baton.config import ServeConfig
from baton.errors import InvalidConfig

if shutil.which("openssl") is None:
    pytest.skip("openssl makes the certificates of these tests", allow_module_level=True)


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server and client: each NAME.pem (certificate) and NAME.key. locked.key: the server's, with a password."""
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=test authority")
    by_ca = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key")
    for name in ("server", "client"):
        named = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl("req", "-x509", *key, *by_ca, "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", *named)
    openssl("ec", "-in", folder / "server.key", "-out", folder / "locked.key", "-aes128", "-passout", "pass:x")
    return folder


def config(files: Path, **more: str) -> ServeConfig:
    return ServeConfig(ssl_certfile=str(files / "server.pem"), ssl_keyfile=str(files / "server.key"), **more)


def trusting(files: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files / "ca.pem"))


def test_answers_and_streams_over_https(text, files: Path):
    with serving(text, tls=tls_context(config(files))) as server:
        server.engine.script.reply = says(text, "Hello over TLS")
        body = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}]}
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trusting(files), timeout=20) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "smol"
            whole = client.post("/v1/chat/completions", json=body).json()
            assert whole["choices"][0]["message"]["content"] == "Hello over TLS"
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            told = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            assert told == "Hello over TLS"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/live", timeout=20)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_nothing_older_than_tls_1_2(text, files: Path):
    old = trusting(files)
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with (
        serving(text, tls=tls_context(config(files))) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as sock,
        pytest.raises(OSError),  # noqa: PT011  # whichever side notices first
    ):
        old.wrap_socket(sock, server_hostname="127.0.0.1")


def test_clients_must_show_a_certificate_where_an_authority_is_named(text, files: Path):
    shown = trusting(files)
    shown.load_cert_chain(files / "client.pem", files / "client.key")
    with serving(text, tls=tls_context(config(files, ssl_ca_certs=str(files / "ca.pem")))) as server:
        url = f"https://127.0.0.1:{server.port}/live"
        assert httpx.get(url, verify=shown, timeout=20).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=trusting(files), timeout=20)


def test_a_client_that_does_not_shake_hands_is_gone_like_one_that_sends_no_headers(text, files: Path):
    limits = ApiConfig(limits=Limits(header_seconds=2))
    with serving(text, limits, tls=tls_context(config(files))) as server:
        with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
            assert sock.recv(1) == b"", "closed, long before asyncio's minute: the socket waits 20 s"
        url = f"https://127.0.0.1:{server.port}/live"
        assert httpx.get(url, verify=trusting(files), timeout=20).status_code == 200


def test_connections_that_never_shake_hands_are_bounded_in_number(text, files: Path):
    """They count like all others, and the oldest of them make room for who does shake hands."""
    limits = ApiConfig(limits=Limits(handshakes=8, header_seconds=60))
    with serving(text, limits, tls=tls_context(config(files))) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]
        assert [sock.recv(1) for sock in silent[:12]] == [b""] * 12, "closed long before their time is over"
        assert eventually(lambda: server.connections.shaking == 8)
        assert eventually(lambda: server.connections.total == 8)
        url = f"https://127.0.0.1:{server.port}/live"
        assert httpx.get(url, verify=trusting(files), timeout=20).status_code == 200
        for sock in silent:
            sock.close()
        assert eventually(lambda: server.connections.total == 0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ssl_certfile": "nothing.pem"}, "--ssl-certfile .*nothing.pem.*No such file"),
        ({"ssl_keyfile": "ca.key"}, "--ssl-keyfile .*ca.key: cannot be used"),
        ({"ssl_keyfile": "locked.key"}, "the key has a password"),
        ({"ssl_ca_certs": "server.key"}, "--ssl-ca-certs .*server.key: cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(files: Path, wrong: dict[str, str], why: str):
    named = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key", **wrong}
    with pytest.raises(InvalidConfig, match=why):
        tls_context(ServeConfig(**{name: str(files / file) for name, file in named.items()}))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_ca_certs"])
def test_a_key_without_a_certificate_is_refused(name: str):
    with pytest.raises(InvalidConfig, match=f"{name} needs an ssl_certfile"):
        ServeConfig(**{name: "file"})
