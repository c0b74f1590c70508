"""`baton router` and `baton serve --router` with TLS: the secret is replaced and an instance revoked while tokens flow, and a
certificate that has expired, or is of another authority, joins nothing."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates, write_secret
from chaos_server import ask, free_port, parse_metrics, until
from test_router_command import START_SECONDS, running, status

OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
REQUEST = {
    "prompt": "Pack my box with five dozen liquor jugs",
    "max_tokens": 200,
    "temperature": 1.0,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}


class Members:
    """A router and instances, each a command with a secret file and a certificate of its own."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self._model, self._folder, self._stack = model, folder, stack
        self._certificates = Certificates(folder)
        self.port, self._cluster_port = free_port(), free_port()
        ports = ("--port", self.port, "--cluster-port", self._cluster_port)
        self._run("router", "router", *ports, *self._trust("router", OLD))

    def start(self, name: str, *lines: str, **certificate: Any) -> subprocess.Popen[bytes]:
        own = ("--router", f"tcp://127.0.0.1:{self._cluster_port}", "--name", name, "--port", free_port())
        sizes = ("--threads", 1, "--kv-blocks", 300, "--block-size", 4, "--slots", 4)
        return self._run(name, "serve", *own, *sizes, *self._trust(name, *lines, **certificate))

    def _run(self, name: str, command: str, *options: object) -> subprocess.Popen[bytes]:
        arguments = (command, self._model, "--served-model-name", "tiny", *options)
        return self._stack.enter_context(running(self._folder / f"{name}.log", *arguments))

    def _trust(self, name: str, *lines: str, **certificate: Any) -> tuple[object, ...]:
        files = self._certificates.files(name, **certificate)
        tls = ("--cluster-ssl-certfile", files.certfile, "--cluster-ssl-keyfile", files.keyfile)
        return ("--cluster-secret", self.write(name, *lines), *tls, "--cluster-ssl-ca-certs", files.ca_certs)

    def write(self, name: str, *lines: str) -> Path:
        return write_secret(self._folder / f"{name}.secret", *lines)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def joined(self) -> set[str]:
        if status(self.port, "/ready") != 200:
            return set()
        return {one["name"] for one in asyncio.run(ask(self.port, "/v1/cluster")).json["instances"] if one["state"] == "alive"}

    def counted(self, event: str) -> float:
        metrics = parse_metrics(asyncio.run(ask(self.port, "/metrics")).content.decode())
        return metrics.get(f'baton:router_sessions_total{{event="{event}"}}', 0)

    def tokens(self) -> Any:
        reply = asyncio.run(ask(self.port, "/v1/completions", REQUEST))
        assert reply.status == 200, reply.content
        assert reply.complete
        return reply.tokens

    @contextmanager
    def flowing(self, expected: Any) -> Iterator[None]:
        """Tokens flow meanwhile, and are those of the undisturbed run."""
        enough = threading.Event()

        def keep_asking() -> int:
            answers = 0
            while not answers or not enough.is_set():
                assert self.tokens() == expected
                answers += 1
            return answers

        with ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(keep_asking) for _ in range(3)]
            try:
                yield
            finally:
                enough.set()
            assert all(each.result(START_SECONDS) for each in asking)


@pytest.mark.timeout(600)
@pytest.mark.slow  # tests/runtime/router/test_revoked.py and tests/trust/test_keyring.py have its parts
def test_secrets_and_instances_come_and_go_while_tokens_flow(tiny: Path, tmp_path: Path):
    with ExitStack() as stack:
        members = Members(tiny, tmp_path, stack)
        members.start("one", OLD)
        until(lambda: members.joined() == {"one"}, "it has joined", START_SECONDS)
        expected = members.tokens()
        with members.flowing(expected):
            for step in ((OLD, NEW), (NEW, OLD), (NEW,)):
                for name in ("router", "one"):
                    members.write(name, *step)
            members.start("late", NEW)
            members.start("former", OLD)
            members.start("expired", NEW, days=-2)
            until(lambda: members.joined() == {"one", "late"}, "the new secret is the cluster's", START_SECONDS)
            until(lambda: "does it have another cluster secret" in members.log("former"), "the old one is not", START_SECONDS)
            until(lambda: "certificate expired" in members.log("expired"), "its own log has the reason", START_SECONDS)
            assert "the instance's certificate is refused: certificate has expired" in members.log("router")
            assert members.counted("certificate") > 0
            assert members.counted("secret") > 0

            members.write("router", NEW, "revoked late")
            until(lambda: members.joined() == {"one"}, "the revoked one has left")
            until(lambda: "late is revoked" in members.log("late"), "its own log has the reason")
            until(lambda: "the router refuses us: late is revoked" in members.log("late"), "when it dials again, too")
            members.write("router", "")  # a mistake: what was read before stays
            until(lambda: "holds no secret" in members.log("router"), "the mistake is in the log")
            assert members.joined() == {"one"}
        assert members.tokens() == expected
        said = "".join(members.log(name) for name in ("router", "one", "late", "former", "expired"))
        assert "Traceback" not in said
        assert OLD not in said
        assert NEW not in said


def test_a_certificate_that_cannot_be_used_is_one_line_before_anything_starts(tiny: Path, tmp_path: Path):
    files = Certificates(tmp_path).files("one")
    secret = write_secret(tmp_path / "secret", OLD)
    common = ("router", tiny, "--cluster-secret", secret, "--port", free_port(), "--cluster-port", free_port())
    tls = ("--cluster-ssl-certfile", files.certfile, "--cluster-ssl-ca-certs", files.ca_certs)  # the key is in another file
    with running(tmp_path / "log", *common, *tls) as router:
        assert router.wait(START_SECONDS) == 1
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == 1
    assert f"--cluster-ssl-certfile {files.certfile}: cannot be used" in said[0]
