"""How long a running stream stands still while somebody else sends a hostile request.

    python bench/noisy_neighbour.py [--model smollm2] [--only WORD] [--goal 3.0] [--seconds 3] [--json]

Starts a real `baton serve`, streams one answer, and notes when each token comes. Undisturbed first: the p99 gap is the measure.
Then each request of the list is sent by another process, and the longest gap until a second after its answer is held against
the goal.

kind      front: the front alone deals with it. Goal: never above 3 times the undisturbed p99
          engine: the model computes for it, so the stream shares steps with it. What that costs at its plainest shows "long
          prompt", a request as good as any (--prefill-tokens-beside-decodes bounds it). Goal: never above 1.5 times that row
gap ms    longest gap while it ran (p99 and longest of the undisturbed stream stand in the first row)
status    of the answers: number of each; "open" was not answered, as planned
MiB       growth of the front's memory

Exit status 1: a row missed the goal, or the server died. On a machine that does other things as well the gaps are theirs too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

SOURCES = Path(__file__).parent.parent / "src"
START_SECONDS_MAX = 300.0
ANSWER_SECONDS_MAX = 120.0
SETTLE_SECONDS = 1.0
HOLD_SECONDS = 3.0
MIB = 1024 * 1024
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
Body = bytes | dict[str, Any]


class Hostile(NamedTuple):
    """Requests that are sent at once, each on a connection of its own."""

    kind: str
    path: str
    make: Callable[[], list[Body]]
    unfinished: bool = False
    "The last byte of the body never comes."
    unread: bool = False
    "The answer is not read."
    key: bool = False
    "With an Idempotency-Key."


def words(count: int, text: str) -> list[str]:
    return [f"{place:04d}{text}"[:1024] for place in range(count)]


def ints(count: int) -> bytes:
    return b"[" + b",".join([b"7"] * count) + b"]"


PLAIN = "long prompt"
LONG = [7 + place % 900 for place in range(4000)]
LISTED: dict[str, Hostile] = {
    PLAIN: Hostile("engine", TEXT, lambda: [{"prompt": LONG, "max_tokens": 1}]),
    "n = 16": Hostile("engine", TEXT, lambda: [{"prompt": "Once", "n": 16, "max_tokens": 40, "ignore_eos": True}]),
    "64 prompts": Hostile("engine", TEXT, lambda: [{"prompt": [f"Tale {i}" for i in range(64)], "max_tokens": 8}]),
    "bad words, digits, x 64": Hostile(
        "front", TEXT, lambda: [{"prompt": ["a"] * 64, "max_tokens": 4, "bad_words": words(1024, "0123456789" * 102)}]
    ),
    "bad words, rare, x 64": Hostile(
        "front", TEXT, lambda: [{"prompt": ["a"] * 64, "max_tokens": 4, "bad_words": words(1024, "\u06dd\u0f12\u1362" * 113)}]
    ),
    "bad words, allowed, x 64": Hostile(
        "engine", TEXT, lambda: [{"prompt": ["a"] * 64, "max_tokens": 4, "bad_words": [f"w{i}" for i in range(500)]}]
    ),
    "logit_bias x 64": Hostile(
        "engine",
        TEXT,
        lambda: [{"prompt": ["a"] * 64, "max_tokens": 4, "logit_bias": {str(place): 1.0 for place in range(1024)}}],
    ),
    "/tokenize 7.8 MB": Hostile("front", "/tokenize", lambda: [{"prompt": "many words " * 709_000}]),
    "/tokenize 1 MB": Hostile("front", "/tokenize", lambda: [{"prompt": "many words " * 95_000}]),
    "/tokenize 1 MB, strings": Hostile(
        "front", "/tokenize", lambda: [{"prompt": "a b c " * 170_000, "return_token_strs": True}]
    ),
    "/detokenize 8 MiB": Hostile("front", "/detokenize", lambda: [{"tokens": [46778] * 1_190_000}]),
    "prompt 8 MB of text": Hostile("front", TEXT, lambda: [{"prompt": "many words " * 709_000, "max_tokens": 1}]),
    "prompt 2.5 MB of spaces": Hostile("front", TEXT, lambda: [{"prompt": " " * 2_500_000, "max_tokens": 1}]),
    "prompts 64 x 120 kB": Hostile("front", TEXT, lambda: [{"prompt": ["many words " * 11_000] * 64, "max_tokens": 1}]),
    "8 MB of ints": Hostile("front", TEXT, lambda: [b'{"prompt": ' + ints(4_190_000) + b"}"]),
    "8 MB of ints, unknown field": Hostile(
        "front", TEXT, lambda: [b'{"prompt": "a", "max_tokens": 1, "x": ' + ints(4_190_000) + b"}"]
    ),
    "8 MB of floats": Hostile("front", TEXT, lambda: [b'{"prompt": [' + b",".join([b"1.5"] * 2_090_000) + b"]}"]),
    "8 MB of objects": Hostile("front", TEXT, lambda: [b'{"prompt": [' + b",".join([b'{"a":1}'] * 1_040_000) + b"]}"]),
    "8 MB of escapes": Hostile("front", TEXT, lambda: [b'{"prompt": "' + b"\\ud83d\\ude00" * 690_000 + b'"}']),
    "8 MB of lone surrogates": Hostile("front", TEXT, lambda: [b'{"prompt": "' + b"\\ud83d" * 1_390_000 + b'"}']),
    "8 MB deep": Hostile("front", TEXT, lambda: [b'{"prompt": ' + b"[" * 8_300_000]),
    "8 MB, broken at the end": Hostile("front", TEXT, lambda: [b'{"prompt": ' + ints(4_190_000) + b"x}"]),
    "stop strings x 64": Hostile(
        "engine", TEXT, lambda: [{"prompt": ["a"] * 64, "max_tokens": 8, "stop": [chr(97 + i) * 1024 for i in range(16)]}]
    ),
    "prompt_logprobs, 4,000 x 20": Hostile("engine", TEXT, lambda: [{"prompt": LONG, "max_tokens": 1, "prompt_logprobs": 20}]),
    "echo with logprobs, n = 16": Hostile(
        "engine", TEXT, lambda: [{"prompt": LONG[:500], "max_tokens": 1, "echo": True, "logprobs": 20, "n": 16}]
    ),
    "chat with control tokens": Hostile(
        "front", CHAT, lambda: [{"messages": [{"role": "user", "content": "<|im_end|> a " * 100_000}], "max_tokens": 1}]
    ),
    "chat of 4,000 messages": Hostile(
        "front", CHAT, lambda: [{"messages": [{"role": "user", "content": "x" * 500}] * 4000, "max_tokens": 1}]
    ),
    "chat of 400,000 messages": Hostile("front", CHAT, lambda: [{"messages": [{"role": "user"}] * 400_000}]),
    "chat of 8 MB": Hostile("front", CHAT, lambda: [{"messages": [{"role": "user", "content": "a b c " * 1_390_000}]}]),
    "60 unfinished bodies": Hostile("front", TEXT, lambda: [b'{"prompt": "' + b"x" * (8 * MIB - 100)] * 60, unfinished=True),
    "30 unread answers": Hostile(
        "engine", TEXT, lambda: [{"prompt": LONG[:400], "max_tokens": 2, "prompt_logprobs": 20}] * 30, unread=True
    ),
    "8 streams with a key": Hostile(
        "engine",
        TEXT,
        lambda: [{"prompt": f"Tale {i}", "max_tokens": 100, "stream": True, "logprobs": 20} for i in range(8)],
        key=True,
    ),
    "200 connections, garbage": Hostile("front", TEXT, lambda: [b"\x00" * 1000] * 200),
}


# The one who sends: a process of its own, so that what it does is not what is measured


def send_all(name: str, port: int) -> None:
    """Says "ready", waits for a line, sends, and says what came."""
    hostile = LISTED[name]
    bodies = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in hostile.make()]
    requests = [_head(hostile, len(body), number) + body for number, body in enumerate(bodies)]
    print("ready", flush=True)
    sys.stdin.readline()
    statuses: Counter[str] = Counter()
    threads = [threading.Thread(target=_send, args=(hostile, request, port, statuses)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(statuses), flush=True)


def _head(hostile: Hostile, length: int, number: int) -> bytes:
    key = f"idempotency-key: {os.getpid()}-{number}\r\n" if hostile.key else ""
    length += 1 if hostile.unfinished else 0
    return (
        f"POST {hostile.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{key}"
        f"connection: close\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def _send(hostile: Hostile, request: bytes, port: int, statuses: Counter[str]) -> None:
    status = "broken"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS_MAX) as connection:
        with contextlib.suppress(ConnectionError):  # refused before it was all sent
            connection.sendall(request)
        if hostile.unread or hostile.unfinished:
            time.sleep(HOLD_SECONDS)
        if hostile.unread:
            status = "open"
        else:
            connection.settimeout(0.5 if hostile.unfinished else ANSWER_SECONDS_MAX)
            status = _status(connection)
    statuses[status] += 1


def _status(connection: socket.socket) -> str:
    answer = b""
    try:
        while data := connection.recv(1 << 20):
            answer = answer or data
    except TimeoutError:
        return "open" if not answer else answer[9:12].decode()
    return answer[9:12].decode() or "closed"


# The one who is disturbed


class Stream(threading.Thread):
    """One streamed answer, and when its events came."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._port = port
        self.start()

    def run(self) -> None:
        body = json.dumps(
            {"prompt": "Once upon a time", "stream": True, "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        ).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 60) as self._connection:
            self._connection.sendall(head.encode() + body)
            while data := self._connection.recv(1 << 16):
                if b"data: " in data:
                    self.times.append(time.monotonic())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.join(30)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between events; the one that is still awaited at `end` counts too."""
        times = [at for at in self.times if begin <= at <= end]
        return [1e3 * (late - early) for early, late in zip([begin, *times], [*times, end], strict=True)]


@contextlib.contextmanager
def serving(model: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    paths = [str(SOURCES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = [sys.executable, "-c", "from baton.cli.main import app; app()", "serve", model, "--port", str(port), "--quiet"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                if connection.recv(1000).startswith(b"HTTP/1.1 200"):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def front_mib(server: int) -> float:
    """Resident memory of the front process."""
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        if b"baton.runtime.front" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    return 0.0


class Row(NamedTuple):
    name: str
    kind: str
    gap_ms: float
    seconds: float
    statuses: dict[str, int]
    grown_mib: float


def undisturbed(port: int, seconds: float) -> list[float]:
    stream = Stream(port)
    time.sleep(2.0)
    begin = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    stream.close()
    return stream.gaps(begin, end)[1:-1]


def disturbed(name: str, port: int, server: int) -> Row:
    command = [sys.executable, __file__, "--send", name, "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdout.readline()
        stream = Stream(port)
        time.sleep(1.5)
        before, begin = front_mib(server), time.monotonic()
        sender.stdin.write(b"\n")
        sender.stdin.flush()
        statuses = json.loads(sender.stdout.readline())
        answered = time.monotonic()
        time.sleep(SETTLE_SECONDS)
        end = time.monotonic()
        grown = front_mib(server) - before
        stream.close()
    gap = max(stream.gaps(begin, end)) if stream.times else 1e9
    return Row(name, LISTED[name].kind, gap, answered - begin, statuses, grown)


def allowed_ms(kind: str, p99: float, goal: float, rows: list[Row]) -> float:
    plain = [row.gap_ms for row in rows if row.name == PLAIN]
    return max(goal * p99, 1.5 * plain[0]) if kind == "engine" and plain else goal * p99


def show(row: Row, p99: float, missed: bool) -> None:
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(row.statuses.items()))
    figures = f"{row.gap_ms:8.1f} {row.gap_ms / p99:6.1f} {row.seconds:8.1f} {row.grown_mib:7.0f}"
    print(f"{row.name:28} {row.kind:7} {figures}  {statuses}{'  MISSED' if missed else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--goal", type=float, default=3.0, help="longest gap, in undisturbed p99 gaps")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the undisturbed stream is watched")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send_all(options.send, options.port)
        return
    with serving(options.model) as (port, process):
        quiet = undisturbed(port, options.seconds)
        p99 = quantiles(quiet, n=100)[98]
        print(f"{'request':28} {'kind':7} {'gap ms':>8} {'ratio':>6} {'answered':>8} {'MiB':>7}  status")
        print(f"{'(undisturbed, p99)':36} {p99:8.1f}    1.0  longest {max(quiet):.1f} ms of {len(quiet)}", flush=True)
        rows: list[Row] = []
        missed: list[str] = []
        for name in LISTED:
            if name == PLAIN or options.only in name:
                rows.append(disturbed(name, port, process.pid))
                if rows[-1].gap_ms > allowed_ms(rows[-1].kind, p99, options.goal, rows):
                    missed.append(name)
                show(rows[-1], p99, name in missed)
                if process.poll() is not None:
                    raise SystemExit("the server is dead")
    if options.json:
        print(json.dumps({"p99_ms": p99, "rows": [row._asdict() for row in rows]}))
    print(f"{len(rows) - len(missed)} of {len(rows)} rows met the goal" + (f"; missed: {', '.join(missed)}" if missed else ""))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
