"""Streaming clients in a closed loop: each sends its next request when its last answer is complete.

They share the cores with the server they measure, so they do next to nothing: one thread waits for all sockets and keeps what
came and when. What it was is looked at when all is over, outside of what is timed.

An answer counts if it came with status 200, exactly the tokens that were asked for, and [DONE] at its end. Anything else
ends the measurement: a figure for less work is no figure.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from time import perf_counter

from measuring.figures import NotMeasured, percentile
from measuring.work import Prompt

SILENCE_SECONDS_MAX = 120.0
"""A server that says nothing to anybody for so long will say nothing more."""
END = b"data: [DONE]"
EMPTY_TEXT = (b'"text":""', b'"text": ""')


@dataclass(slots=True)
class Answer:
    sent: float
    pieces: list[float] = field(default_factory=list)
    "When text came; several pieces in one packet came at one time."
    tokens: int = 0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a load gave. Times in milliseconds."""

    seconds: float
    output_rate: float
    "Output tokens a second."
    ttft_mean: float
    itl_mean: float
    itl_p99: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Load:
        gaps = [late - early for answer in answers for early, late in pairwise(answer.pieces)]
        return cls(
            seconds=seconds,
            output_rate=sum(answer.tokens for answer in answers) / seconds,
            ttft_mean=1000 * fmean(answer.pieces[0] - answer.sent for answer in answers),
            itl_mean=1000 * fmean(gaps) if gaps else 0.0,
            itl_p99=1000 * percentile(gaps, 0.99) if gaps else 0.0,
        )


def load(port: int, model: str, prompts: Sequence[Prompt], output: int, clients: int) -> Load:
    return load_bodies(port, [request_bytes(port, model, prompt, output) for prompt in prompts], output, clients)


def request_bytes(port: int, model: str, prompt: Prompt, output: int, *, token_ids: bool = False) -> bytes:
    asked = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    more = {"return_token_ids": True} if token_ids else {}
    body = json.dumps({**asked, **more, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def load_bodies(port: int, bodies: Sequence[bytes], output: int, clients: int) -> Load:
    streams, seconds = stream_all(port, bodies, clients)
    return Load.of([stream.answer(output) for stream in streams], seconds)


def stream_all(port: int, bodies: Sequence[bytes], clients: int) -> tuple[list[Stream], float]:
    """What came of each, and how long all of it took."""
    todo, streams, running = list(bodies[::-1]), list[Stream](), dict[int, Stream]()
    with select.epoll() as epoll:

        def send() -> None:
            stream = Stream(port, todo.pop())
            streams.append(stream)
            running[stream.socket.fileno()] = stream
            epoll.register(stream.socket, select.EPOLLIN)

        begin = perf_counter()
        try:
            for _ in range(min(clients, len(bodies))):
                send()
            while running:
                ready = epoll.poll(SILENCE_SECONDS_MAX)
                now = perf_counter()
                if not ready:
                    raise NotMeasured(f"nothing came for {SILENCE_SECONDS_MAX:.0f} s")
                for number, _ in ready:
                    if running[number].read(now):
                        epoll.unregister(number)
                        running.pop(number).socket.close()
                        if todo:
                            send()
        finally:
            for stream in running.values():
                stream.socket.close()
        seconds = perf_counter() - begin
    return streams, seconds


class Stream:
    """One request. Chunk sizes of the transfer encoding are lines of their own here, and skipped like all others."""

    def __init__(self, port: int, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SILENCE_SECONDS_MAX)
        self.sent = perf_counter()
        self.socket.sendall(body)
        self.parts: list[tuple[float, bytes]] = []

    def read(self, now: float) -> bool:
        """What has come by now; whether it was the last. A connection that is reset has ended."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        self.parts.append((now, data))
        return not data or END in data

    def answer(self, output: int) -> Answer:
        answer, rest, first = Answer(self.sent), b"", True
        for now, data in self.parts:
            *lines, rest = (rest + data).split(b"\n")
            if first and lines:
                first = False
                if b" 200 " not in lines[0]:
                    raise NotMeasured(f"{lines[0].decode().strip()}: {data[-300:].decode(errors='replace')}")
            for line in lines:
                if line.startswith(b"data:"):
                    _on_event(answer, line, now)
        if rest.startswith(END):  # the end of its line was not waited for
            answer.ended = now
        if not answer.ended:
            raise NotMeasured("the connection ended before the answer did")
        if answer.tokens != output or not answer.pieces:
            raise NotMeasured(f"an answer of {answer.tokens} tokens where {output} were asked for")
        return answer


def _on_event(answer: Answer, line: bytes, now: float) -> None:
    if line.startswith(END):
        answer.ended = now
    elif b'"error"' in line[:16]:
        raise NotMeasured(line.decode(errors="replace"))
    else:
        if b'"text"' in line and not any(empty in line for empty in EMPTY_TEXT):
            answer.pieces.append(now)
        if b'"completion_tokens"' in line:
            answer.tokens = json.loads(line[5:])["usage"]["completion_tokens"]
