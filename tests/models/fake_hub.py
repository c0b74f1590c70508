"""A Hugging Face hub on loopback, as far as its own client asks: what a model has, and its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep
from urllib.parse import unquote, urlsplit


class FakeHub:
    """`hub.add(repo, files)` makes a commit, which `main` and `revision` mean from then on."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.sent: list[str] = []
        "Files that were asked for as a whole."
        self.ranges: list[str] = []
        "Files of which a part was asked for."
        self.knows_ranges = True
        self.bytes_sent = 0
        "Of files."
        self.chunk_bytes, self.chunk_seconds = 1 << 16, 0.0
        "A slow hub sends files in chunks with a pause after each."

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.refs[repo, revision] = self.refs[repo, commit] = commit
        return commit

    def answer(self, method: str, path: str, span: str = "") -> tuple[int, dict[str, str], bytes]:
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
            files = [{"rfilename": name, "size": len(content)} for name, content in contents.items()]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": files}).encode()
        if len(parts) < 5:
            return 404, {}, path.encode()
        repo, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        commit = self.refs[repo, revision]
        content = self.commits[repo, commit][file]
        headers = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "x-repo-commit": commit}
        if method == "GET" and span:
            self.ranges.append(file)
            if self.knows_ranges:
                first, last = map(int, span.removeprefix("bytes=").split("-"))
                return 206, {**headers, "content-range": f"bytes {span}/{len(content)}"}, content[first : last + 1]
        elif method == "GET":
            self.sent.append(file)
        return 200, headers, content


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.command, self.path, self.headers.get("range", ""))
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.send(content, counted="etag" in headers)

        def send(self, content: bytes, *, counted: bool) -> None:
            for start in range(0, len(content), hub.chunk_bytes):
                chunk = content[start : start + hub.chunk_bytes]
                hub.bytes_sent += len(chunk) if counted else 0
                try:
                    self.wfile.write(chunk)
                except OSError:  # the client has read enough
                    return
                if counted:
                    sleep(hub.chunk_seconds)

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
