"""Answers that run while something else happens: when each of their tokens came."""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from itertools import pairwise
from statistics import quantiles

from measuring.served import ANSWER_SECONDS_MAX, Server


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(300, 40_000) for _ in range(tokens)]


class Stream(threading.Thread):
    """One answer that goes on until it is told to stop, or until its context is full."""

    def __init__(self, server: Server, ids: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.failed = ""
        self._port, self._ids, self._tokens = server.port, ids, tokens
        self._over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS_MAX)
        body = {"prompt": self._ids, "max_tokens": self._tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                self.failed = f"{answer.status} {answer.read()[:200]!r}"
            for line in answer:
                if line.startswith(b'data: {"error'):
                    self.failed = line.decode()
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
                if self._over.is_set():
                    break
        except OSError as error:
            self.failed = repr(error)
        finally:
            connection.close()

    def stop(self) -> None:
        self._over.set()


class Streams:
    """Several at once, far from the end of their contexts for some minutes. `with Streams(...) as streams`."""

    def __init__(self, server: Server, count: int, tokens: int = 100_000) -> None:
        context = int(json.loads(server.get("/v1/models"))["data"][0].get("max_model_len", 2048))
        self.streams = [Stream(server, prompt(seed, 20), min(tokens, context - 40)) for seed in range(count)]

    def __enter__(self) -> Streams:
        for stream in self.streams:
            stream.start()
        deadline = time.monotonic() + 120
        while any(len(stream.times) < 2 for stream in self.streams):
            assert time.monotonic() < deadline, [stream.failed for stream in self.streams]
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.stop()
        for stream in self.streams:
            stream.join(30)

    def gaps(self, begin: float, end: float) -> list[float]:
        found = []
        for stream in self.streams:
            if stream.failed:
                print(f"a stream failed: {stream.failed}", file=sys.stderr)
            times = [at for at in list(stream.times) if begin <= at <= end]
            found += [b - a for a, b in pairwise(times)]
        return found


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[-1] if len(values) > 1 else float("nan")
