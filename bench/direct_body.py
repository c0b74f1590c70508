"""What a streamed event costs the front: written to the socket (api/http/server.py: DirectBody), and by uvicorn's own way.

    python bench/direct_body.py

A server with a scripted engine in this process, whose processor time is counted; the clients are another process. The time of
the scripted engine and of everything else in the front is in both figures, so their difference is the gain.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "api"))

from api_fakes import Script, serving

from baton.api.http.server import StrictProtocol
from baton.models.names import DEFAULT_MODEL, resolve
from baton.text.loading import ModelText, load_model_text

STREAMS, TOKENS, ROUNDS = 16, 400, 5
CLIENTS = """
import asyncio, sys
body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": %s}' % sys.argv[3].encode()
lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: 127.0.0.1", b"content-type: application/json", b"connection: close"]
head = b"\\r\\n".join(lines) + b"\\r\\n"
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    writer.write(head + b"content-length: %d\\r\\n\\r\\n" % len(body) + body)
    events = 0
    while data := await reader.read(65536):
        events += data.count(b"data: ")
    return events
async def main():
    print(sum(await asyncio.gather(*[one() for _ in range(int(sys.argv[2]))])))
asyncio.run(main())
"""


def microseconds(text: ModelText, *, direct: bool) -> float:
    own = StrictProtocol.on_headers_complete
    if not direct:

        def without(self: StrictProtocol) -> None:
            own(self)
            self.scope["state"].pop("direct_body", None)

        StrictProtocol.on_headers_complete = without  # type: ignore[method-assign]
    try:
        with serving(text) as server:
            server.engine.script = Script(
                reply=lambda request, index: [10 + n % 200 for n in range(TOKENS)], delay_seconds=0.001
            )
            begin = process_time()
            command = [sys.executable, "-c", CLIENTS, str(server.port), str(STREAMS), str(TOKENS)]
            events = int(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)
            return (process_time() - begin) / events * 1e6
    finally:
        StrictProtocol.on_headers_complete = own  # type: ignore[method-assign]


def main() -> None:
    text = load_model_text(resolve(DEFAULT_MODEL))
    microseconds(text, direct=True)  # warm
    found = [(microseconds(text, direct=True), microseconds(text, direct=False)) for _ in range(ROUNDS)]
    direct, uvicorns = (median(each) for each in zip(*found, strict=True))
    print(f"{STREAMS} streams: {direct:.0f} us of the front an event; uvicorn's way {uvicorns:.0f} us")


if __name__ == "__main__":
    main()
