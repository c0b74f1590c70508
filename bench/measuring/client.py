"""Streaming clients in a closed loop: each sends its next request when its last answer is complete.

They share the cores with the server they measure, so they cost next to nothing: bytes are looked at as they come from the
socket, events are counted and not parsed, and only the last one, with the usage, is read as JSON. About 10 µs an event.

An answer counts if it came with status 200, exactly the tokens that were asked for, and [DONE] at its end. Anything else
ends the measurement: a figure for less work is no figure.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from time import perf_counter

from measuring.figures import NotMeasured, percentile
from measuring.work import Prompt

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
    bodies = [request_bytes(port, model, prompt, output) for prompt in prompts]
    return asyncio.run(_load(port, bodies, output, clients))


def request_bytes(port: int, model: str, prompt: Prompt, output: int) -> bytes:
    asked = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def _load(port: int, bodies: list[bytes], output: int, clients: int) -> Load:
    todo, answers = bodies[::-1], list[Answer]()

    async def client() -> None:
        while todo:
            answers.append(await _ask(port, todo.pop(), output))

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(min(clients, len(bodies)))))
    return Load.of(answers, perf_counter() - begin)


async def _ask(port: int, body: bytes, output: int) -> Answer:
    loop = asyncio.get_running_loop()
    stream = Stream(body, loop.create_future())
    transport, _ = await loop.create_connection(lambda: stream, "127.0.0.1", port)
    try:
        answer = await stream.done
    finally:
        transport.close()
    if answer.tokens != output or not answer.pieces:
        raise NotMeasured(f"an answer of {answer.tokens} tokens where {output} were asked for")
    return answer


class Stream(asyncio.Protocol):
    """One request. Chunk sizes of the transfer encoding are lines of their own here, and skipped like all others."""

    def __init__(self, body: bytes, done: asyncio.Future[Answer]) -> None:
        self.body, self.done = body, done
        self.answer = Answer(sent=0.0)
        self.rest = b""
        self.checked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.answer.sent = perf_counter()
        transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        if not self.checked and lines:
            self.checked = True
            if b" 200 " not in lines[0]:
                self._end(NotMeasured(f"{lines[0].decode().strip()}: {data[-300:].decode(errors='replace')}"))
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line, now)

    def _on_event(self, line: bytes, now: float) -> None:
        if line.startswith(END):
            self.answer.ended = now
            self._end(None)
        elif b'"error"' in line[:16]:
            self._end(NotMeasured(line.decode(errors="replace")))
        else:
            if b'"text"' in line and not any(empty in line for empty in EMPTY_TEXT):
                self.answer.pieces.append(now)
            if b'"completion_tokens"' in line:
                self.answer.tokens = json.loads(line[5:])["usage"]["completion_tokens"]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(NotMeasured("the connection ended before the answer did"))

    def _end(self, error: NotMeasured | None) -> None:
        if self.done.done():
            return
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(self.answer)
