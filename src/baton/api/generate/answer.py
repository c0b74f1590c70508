"""Answers a request that generates, from its first byte to its end; the same for both endpoints."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.errors import as_api_error, error_response, to_json
from baton.api.front import Front, caller_of, front_of, logger
from baton.api.generate.generation import Generation
from baton.api.generate.live import LiveRequest
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.generate.shape import Shape, usage_json
from baton.api.http.budget import Lease
from baton.api.http.idempotency import Remembered
from baton.api.http.json_body import read_body
from baton.api.http.json_parts import send_json
from baton.api.http.request_log import is_name, record_of
from baton.api.http.streaming import (
    DONE,
    ClientGone,
    EventStream,
    SendBuffer,
    drop_connection,
    event,
    one_line,
    while_connected,
)
from baton.errors import EngineError

EVENT_STREAM = "text/event-stream"
Put = Callable[[bytes], None]


class GenerateRoute:
    """An ASGI endpoint: it has to see the client leave, which an ordinary handler does not."""

    def __init__(self, shape: type[Shape]) -> None:
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        front = front_of(request)
        call = _Call(front, request, self._shape(front), send)
        try:
            with front.budget.lease() as lease:
                call.body = await read_body(request, front.limits, lease)  # first: a slow body holds no place
                with front.live.admitted(call.caller.tenant, (call.shape.id, call.request_id)) as live:
                    await call.answer(live, lease)
        except (ClientGone, ClientDisconnect) as gone:
            how = gone.how if isinstance(gone, ClientGone) else "disconnected"
            front.metrics.answer_broken(how)
            call.record.ended = how
        except Exception as error:
            await call.fail(error)


class _Call:
    def __init__(self, front: Front, request: Request, shape: Shape, send: Send) -> None:
        self.front = front
        self.request = request
        self.shape = shape
        self.body = b""
        "Until the job is made of it."
        self.caller = caller_of(request)
        self.record = record_of(request)
        self.request_id = self.record.request_id
        self._send = send
        self._started = asyncio.get_running_loop().time()
        self._key = self._idempotency_key()
        self._entry: Remembered | None = None

    async def answer(self, live: LiveRequest, lease: Lease) -> None:
        front = self.front
        if self._key is None:
            await self._generate(live, lease)
            return
        entry = front.idempotency.begin(self.caller.tenant, self._key, self.shape.object_whole, self.body)
        if entry.answer is not None:
            lease.take(len(entry.answer))
            await self._respond(Response(entry.answer, headers={**self._headers, "content-type": entry.media_type}))
            return
        self._entry = entry
        try:
            await self._generate(live, lease)
        finally:
            self._forget()

    async def fail(self, error: Exception) -> None:
        """Nothing has been sent yet."""
        known = as_api_error(error)
        self.record.ended = known.code or "error"
        if known.http_status == 500:
            self._log_failure(error)
        self.front.metrics.request_refused(known.code or str(known.http_status))
        retry = self.front.config.retry_after_seconds
        await self._respond(error_response(known, retry_after_seconds=retry, request_id=self.request_id))

    def _log_failure(self, error: BaseException) -> None:
        """A traceback only for what nobody foresaw."""
        if isinstance(error, EngineError):
            logger.error("request %s failed: %s", self.request_id, error)
        else:
            logger.error("request %s failed: %s", self.request_id, type(error).__name__, exc_info=error)

    def _remember(self, answer: bytes | None, media_type: str) -> None:
        """Before its last byte goes out: a client that has it all may come back at once. None: too large to be kept."""
        if self._entry is not None and answer is not None:
            self.front.idempotency.finish(self._entry, answer, media_type)

    def _forget(self) -> None:
        """An answer that is not complete. Before the client is told so, for the same reason."""
        if self._key is not None and self._entry is not None and self._entry.answer is None:
            self.front.idempotency.drop(self.caller.tenant, self._key, self._entry)

    async def _generate(self, live: LiveRequest, lease: Lease) -> None:
        def make_job() -> Job:
            return self.shape.job(self.front.json.parse(self.body), self.caller)

        job = await self.front.off_loop(len(self.body), make_job, renders=self.shape.renders)
        self.body = b""
        lease.close()  # only token ids are left
        generation = Generation(self.front, job, live, self._started)
        self.record.ignored = job.options.ignored
        self.record.usage, self.record.ended = (lambda: generation.usage), (lambda: generation.finish_words)
        if job.options.stream.stream:
            await self._stream(job, generation, lease)
        else:
            await self._whole(job, generation, lease)

    async def _whole(self, job: Job, generation: Generation, lease: Lease) -> None:
        choices: dict[int, Piece] = {}

        def collect(piece: Piece) -> None:
            lease.take(piece.size_bytes)
            if piece.choice in choices:
                choices[piece.choice].add(piece)
            else:
                choices[piece.choice] = piece

        work = generation.run(collect, lambda choice, text: collect(Piece(choice, text)))
        await while_connected(self.request.receive, work)
        pieces = [choices[choice] for choice in range(job.sequences)]
        await self._send_whole(self.shape.whole(job, pieces, generation.usage))

    async def _send_whole(self, answer: dict[str, Any]) -> None:
        sent = self.front.idempotency.recording()

        def keep(part: bytes, last: bool) -> None:
            if self._entry is not None:
                sent.add(part)
            if last:
                self._remember(sent.content, "application/json")

        sending = send_json(
            self._send, answer, headers=self._headers, write_seconds=self.front.limits.write_seconds, before=keep
        )
        try:
            await while_connected(self.request.receive, sending)
        except ClientGone:
            drop_connection(self.request.scope)  # what it has not read is not kept for it
            raise
        finally:
            sent.close()

    async def _stream(self, job: Job, generation: Generation, lease: Lease) -> None:
        buffer = SendBuffer(self.front.limits.send_buffer_bytes, lease)
        sent = self.front.idempotency.recording()

        def put_and_keep(content: bytes) -> None:
            sent.add(content)
            buffer.put(content)

        chunks = _Chunks(self.shape, job, generation, buffer.put if self._entry is None else put_and_keep)
        stream = EventStream(
            self.request.scope,
            self.request.receive,
            self._send,
            headers={**self._headers, "content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"},
            keep_alive_seconds=self.front.config.keep_alive_seconds,
            write_seconds=self.front.limits.write_seconds,
            turn=self.front.turn,
        )

        async def produce() -> None:
            try:
                await generation.run(chunks.add, chunks.add_text)
                chunks.end()
                self._remember(sent.content, EVENT_STREAM)
            finally:
                sent.close()
                self._forget()

        await stream.run(buffer, produce)
        if stream.error is not None:
            self._log_failure(stream.error)
            raise ClientGone("failed")

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id}

    async def _respond(self, response: Response) -> None:
        try:
            async with asyncio.timeout(self.front.limits.write_seconds):
                await response(self.request.scope, self.request.receive, self._send)
        except TimeoutError:
            raise ClientGone("slow") from None

    def _idempotency_key(self) -> str | None:
        key = self.request.headers.get("idempotency-key")
        return key if key is not None and is_name(key, self.front.limits) else None


class _Chunks:
    """Pieces to events. A piece without text (half a character, perhaps a stop string) waits for the next one with some."""

    def __init__(self, shape: Shape, job: Job, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._put = put
        self._job = job
        self._generation = generation
        self._waiting: dict[int, Piece] = {}
        self._begun: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        "By choice: what stands before and after the text in an event that has nothing else to say, as most have."

    def add_text(self, choice: int, text: str) -> None:
        """A piece that is nothing else."""
        frame = self._frames.get(choice)
        if frame is not None:
            before, after = frame
            self._put(before + one_line(text) + after)
            return
        self.add(Piece(choice, text))
        self._frames[choice] = self._frame(choice)

    def add(self, piece: Piece) -> None:
        if piece.choice in self._waiting:
            earlier = self._waiting.pop(piece.choice)
            earlier.add(piece)
            piece = earlier
        if not piece.worth_sending:
            self._waiting[piece.choice] = piece
        else:
            self._put(self._event(piece))
            self._begun.add(piece.choice)

    def _event(self, piece: Piece) -> bytes:
        options = self._job.options.stream
        usage = _usage_so_far(piece) if options.continuous_usage else None
        choice = self._shape.delta(self._job, piece, first=piece.choice not in self._begun)
        return event(self._shape.chunk([choice], usage, with_usage=options.include_usage))

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        """Cut out of an event with a text that stands nowhere else in it, so that the shape is written in one place."""
        mark = f"<{uuid.uuid4().hex}>"
        before, after = self._event(Piece(choice, mark)).split(to_json(mark))
        return before, after

    def end(self) -> None:
        if self._job.options.stream.include_usage:
            self._put(event(self._shape.chunk([], usage_json(self._generation.usage), with_usage=True)))
        self._put(DONE)


def _usage_so_far(piece: Piece) -> dict[str, Any]:
    """Of this chunk's choice. What was cached is known at the end."""
    prompt, output = piece.usage
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
