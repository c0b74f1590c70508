"""A Hugging Face hub on loopback, as far as its own client asks: what a model has, and its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


class FakeHub:
    """`hub.add(repo, files)` makes a commit, which `main` and `revision` mean from then on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.sent: list[str] = []
        "Files whose bytes were asked for."

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.refs[repo, revision] = self.refs[repo, commit] = commit
        return commit

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, revision = "/".join(parts[2:4]), "/".join(parts[5:]) or "main"
            commit = self.refs.get((repo, revision))
            if commit is None:
                return 404, {"x-error-code": "RevisionNotFound" if (repo, "main") in self.refs else "RepoNotFound"}, b"{}"
            contents = self.commits[repo, commit]
            if parts[4:5] == ["tree"]:
                rows = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in contents.items()
                ]
                return 200, {}, json.dumps(rows).encode()
            files = [{"rfilename": name} for name in contents]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": files}).encode()
        repo, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        commit = self.refs[repo, revision]
        content = self.commits[repo, commit][file]
        if method == "GET":
            self.sent.append(file)
        return 200, {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "x-repo-commit": commit}, content


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
