"""An OpenAI-style server on loopback that says what it is told to, slowly: for `baton chat` and `baton bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote


@contextmanager
def fake_openai(
    deltas: Sequence[dict[str, Any]], usage: dict[str, Any], *, hold: Event | None = None, any_name: bool = False
) -> Iterator[str]:
    """Its address. `hold`: the answer waits for it after the first delta. `any_name`: as with --served-model-name '*'."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = unquote(self.path.removeprefix("/v1/models").removeprefix("/"))
            if name and not any_name and name != "thinker":
                self.send_error(404)
                return
            found = {"id": name} if name else {"data": [{"id": "thinker"}]}
            self.answer("application/json", [json.dumps(found).encode()])

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer("text/event-stream", self.events())

        def events(self) -> Iterator[bytes]:
            for place, delta in enumerate(deltas):
                yield self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                if place == 0 and hold is not None:
                    hold.wait(60)
            yield self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
            yield b"data: [DONE]\n\n"

        def event(self, content: dict[str, Any]) -> bytes:
            return f"data: {json.dumps(content)}\n\n".encode()

        def answer(self, kind: str, pieces: Any) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
