"""An engine that follows a script, and a real uvicorn around an app."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from uvicorn.server import ServerState

from baton.api.app import make_app
from baton.api.config import ApiConfig, ServedModel
from baton.api.generate.engine_client import Begun, Delta, Ended, EngineRefused, EngineStats, TokenLogprob
from baton.api.http.connection_limit import Connections
from baton.api.http.server import make_server
from baton.errors import CallerError, EngineError
from baton.protocol.ids import RequestId
from baton.protocol.output import EndError
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.text.loading import ModelText

VOCAB = 49152
CONTEXT = 512


ENDS = (0, 2)
"The ids with which SmolLM2 ends a text and a turn."


def pseudo_tokens(request: GenerateRequest, index: int) -> list[int]:
    """Any tokens, special ones and halves of characters too: a function of prompt, seed and index."""
    root = hashlib.sha256(repr((request.prompt, request.sampling.seed, index)).encode()).digest()
    tokens = []
    for position in range(request.sampling.max_tokens):
        draw = int.from_bytes(hashlib.sha256(root + position.to_bytes(4, "big")).digest()[:8], "big")
        # SmolLM2's first 17 ids are special, the next ones single bytes.
        token = draw % 300 if draw % 3 else draw % VOCAB
        # Requests without a seed get a random one: no draw may end an answer that a test expects to go on.
        tokens.append(token if token not in ENDS else token + 17)
    return tokens


def a_logprob(token: int, top: int) -> TokenLogprob:
    likeliest = tuple(((token + place) % VOCAB, -0.25 * (place + 1)) for place in range(top))
    return TokenLogprob(token, -0.25, 1, likeliest)


def a_vector(request: GenerateRequest) -> bytes:
    if labels := request.sampling.label_ids:
        return struct.pack(f"<{len(labels)}f", *((len(request.prompt) % 7) / (place + 1) for place in range(len(labels))))
    return struct.pack("<3f", 1.0, float(len(request.prompt)), 0.5 if request.sampling.pooling == "mean" else 0.25)


@dataclass
class Script:
    """What the engine does with every request from now on."""

    reply: Callable[[GenerateRequest, int], list[int]] = pseudo_tokens
    delay_seconds: float = 0.0
    "Before each delta."
    tokens_per_delta: int = 1
    cuts: tuple[int, ...] = ()
    "Tokens of the first deltas of a sequence; the later ones have tokens_per_delta."
    refuse: Refused | None = None
    fail_after: int | None = None
    "Raise after that many deltas."
    error: EngineError | None = None
    end_error_after: int | None = None
    "End with ERROR after that many tokens."
    error_detail: str = "row failed: NaN logits"
    end_error: EndError = "row_failed"
    ends_by: FinishReason = FinishReason.LENGTH
    "Where no stop token does."
    silent: bool = False
    "Never says anything."
    deaf: bool = False
    "Does not hear aborts."
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    cached_by_siblings: int = 0
    "More of them than that where a sequence is not the first: it finds what the first one has computed."
    host_tokens: int = 0
    storage_tokens: int = 0
    "Of the cached ones."
    preemptions: int = 0
    prefill_seconds: float = 0.0


@dataclass
class FakeEngine:
    script: Script = field(default_factory=Script)
    requests: list[GenerateRequest] = field(default_factory=list, repr=False)
    aborts: list[tuple[RequestId, int | None, FinishReason]] = field(default_factory=list, repr=False)
    live: dict[RequestId, dict[int | None, FinishReason]] = field(default_factory=dict)
    "Requests being generated, with the aborts they have heard."
    snapshot: EngineStats = field(default_factory=EngineStats)
    sick: EngineError | None = None
    pings: int = 0
    paused_with: list[float | None] = field(default_factory=list)
    loaded: str = ""

    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        script = self.script
        self.requests.append(request)
        if script.refuse is not None:
            raise EngineRefused(script.refuse)
        self.live[request.id] = {}
        try:
            async for delta in self._deltas(request, script):
                take(delta)
        finally:
            del self.live[request.id]

    async def _deltas(self, request: GenerateRequest, script: Script) -> AsyncIterator[Delta]:
        began, sent = time.monotonic(), 0
        sampling = request.sampling
        left = {index: self._until_stop(request, script.reply(request, index)) for index in range(request.n)}
        done, deltas = dict.fromkeys(left, 0), dict.fromkeys(left, 0)
        prompt = None
        if sampling.prompt_logprobs is not None:
            prompt = [None, *(a_logprob(token, sampling.prompt_logprobs) for token in request.prompt[1:])]
        while left:
            await asyncio.sleep(3600 if script.silent else script.delay_seconds)
            for index in list(left):
                if script.fail_after is not None and sent >= script.fail_after:
                    raise script.error or RuntimeError("the prompt was: secret words")
                heard = {} if script.deaf else self.live[request.id]
                ended = heard.get(index) or heard.get(None)
                if ended is None and request.timeout_seconds and time.monotonic() - began > request.timeout_seconds:
                    ended = FinishReason.TIMEOUT
                tokens, stopped = left[index]
                size = script.cuts[deltas[index]] if deltas[index] < len(script.cuts) else script.tokens_per_delta
                now, rest = tokens[:size], tokens[size:]
                deltas[index] += 1
                if ended is None and script.end_error_after is not None and done[index] >= script.end_error_after:
                    ended = FinishReason.ERROR
                if ended is not None:
                    now = []
                elif not rest:
                    ended = FinishReason.STOP if stopped else script.ends_by
                done[index] += len(now)
                left[index] = (rest, stopped)
                logprobs = [] if sampling.logprobs is None else [a_logprob(token, sampling.logprobs) for token in now]
                end = self._end(request, index, ended, done[index]) if ended else None
                begun = self._begun(request, index) if now and done[index] == len(now) else None
                pooled = a_vector(request) if sampling.pooling is not None and now else b""
                yield Delta(index, now, logprobs, prompt if index == 0 else None, end, begun, embedding=pooled)
                prompt = None if index == 0 else prompt
                sent += 1
                if ended is not None:
                    del left[index]

    def _until_stop(self, request: GenerateRequest, tokens: list[int]) -> tuple[list[int], bool]:
        stops, least = set(request.sampling.stop_token_ids), request.sampling.min_tokens
        tokens = tokens[: request.sampling.max_tokens]
        for place, token in enumerate(tokens, start=1):
            if token in stops and place >= least:
                return tokens[:place], True
        return tokens, False

    def _begun(self, request: GenerateRequest, index: int) -> Begun:
        script = self.script
        cached = script.cached_tokens + (script.cached_by_siblings if index else 0)
        return Begun(request.id, 1, index, cached, script.host_tokens, script.storage_tokens, script.prefill_seconds)

    def _end(self, request: GenerateRequest, index: int, reason: FinishReason, output: int) -> Ended:
        return Ended(
            request=request.id,
            index=index,
            reason=reason,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.script.cached_tokens + (self.script.cached_by_siblings if index else 0),
            output_tokens=output,
            preemptions=self.script.preemptions,
            host_tokens=self.script.host_tokens,
            storage_tokens=self.script.storage_tokens,
            drafted_tokens=self.script.drafted_tokens,
            accepted_tokens=self.script.accepted_tokens,
            error=self.script.end_error if reason is FinishReason.ERROR else None,
            detail=self.script.error_detail if reason is FinishReason.ERROR else "",
        )

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborts.append((request, index, reason))
        if request in self.live:
            self.live[request].setdefault(index, reason)

    async def ping(self, timeout_seconds: float) -> None:
        self.pings += 1
        if self.sick is not None:
            raise self.sick

    def stats(self) -> EngineStats:
        return self.snapshot

    async def pause(self, drain_seconds: float | None) -> None:
        self.paused_with.append(drain_seconds)
        self.snapshot.mode = "paused"

    async def clear_cache(self, *, device: bool, host: bool) -> None:
        self.cleared = (device, host)

    async def sleep(self, drain_seconds: float | None) -> None:
        self.paused_with.append(drain_seconds)
        self.snapshot.mode = "asleep"

    async def wake(self) -> None:
        self.snapshot.mode = "serving"

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        if "broken" in model:
            raise CallerError(f"{model}: not a model")
        self.paused_with.append(drain_seconds)
        self.loaded = model

    async def resume(self) -> None:
        self.snapshot.mode = "serving"


def says(text: ModelText, answer: str, *, then_end: bool = True) -> Callable[[GenerateRequest, int], list[int]]:
    ids = text.tokenizer.encode(answer, add_special_tokens=False)
    return lambda request, index: [*ids, *(text.tokenizer.eos_ids[:1] if then_end else ())]


MODEL = ServedModel(
    name="smol", aliases=("gpt-3.5-turbo",), context_tokens=CONTEXT, head_width=VOCAB, fingerprint="fp_test", created=7
)


@dataclass
class Serving:
    engine: FakeEngine
    url: str
    port: int
    app: object
    state: ServerState
    "uvicorn's: its open connections."
    connections: Connections


@contextlib.contextmanager
def serving(
    text: ModelText, config: ApiConfig | None = None, *, model: ServedModel = MODEL, **settings: object
) -> Iterator[Serving]:
    """A real server on loopback, in a thread of its own."""
    engine = FakeEngine()
    app = make_app(engine, text.tokenizer, text.chat_template, model, config or ApiConfig())
    server = make_server(app, port=0, log_level="critical", timeout_graceful_shutdown=1, **settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Serving(engine, f"http://127.0.0.1:{port}", port, app, server.server_state, server.open_connections)
    finally:
        server.should_exit = True
        thread.join(10)


def eventually(true: Callable[[], object], seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.005)
    return bool(true())
