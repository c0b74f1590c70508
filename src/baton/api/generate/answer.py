"""Answers one generating request, from its first byte to its end; the same for all dialects."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.api.dialect import dialect_of
from baton.api.errors import ApiError, as_api_error, error_response
from baton.api.front import Front, caller_of, front_of, logger
from baton.api.generate.generation import Generation
from baton.api.generate.live import LiveRequest
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.generate.shape import NothingToGenerate, Shape
from baton.api.http.azure_paths import deployment_of
from baton.api.http.budget import Lease
from baton.api.http.idempotency import Remembered
from baton.api.http.json_body import read_body
from baton.api.http.json_parts import send_json
from baton.api.http.request_log import is_name, record_of
from baton.api.http.streaming import (
    ClientGone,
    EventStream,
    SendBuffer,
    drop_connection,
    while_connected,
)
from baton.api.http.trace import traceparent_of
from baton.errors import EngineError


class GenerateRoute:
    """An ASGI endpoint, because an ordinary handler does not see that the client disconnects."""

    def __init__(self, shape: type[Shape]) -> None:
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        front = front_of(request)
        call = _Call(front, request, self._shape(front), send)
        try:
            with front.budget.lease() as lease:
                # the body is read first, so that a slow one occupies no stream
                call.body = await read_body(request, front.limits, lease)
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
        "The raw body. Empty once the job is built from it."
        self.caller = caller_of(request)
        self.record = record_of(request)
        self.request_id = self.record.request_id
        self._dialect = dialect_of(request.scope)
        self._send = send
        self._started = asyncio.get_running_loop().time()
        self._key = self._idempotency_key()
        self._entry: Remembered | None = None

    async def answer(self, live: LiveRequest, lease: Lease) -> None:
        front = self.front
        if self._key is None:
            await self._generate(live, lease)
            return
        entry = front.idempotency.begin(self.caller.tenant, self._key, self.shape.kind, self.body)
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
        """Responds with the error, if nothing was sent before."""
        known = as_api_error(error)
        self.record.ended = known.code or "error"
        if known.http_status == 500:
            self._log_failure(error)
        self.front.metrics.request_refused(known.code or str(known.http_status))
        body = self._dialect.error_body(known, self.request_id)
        retry = self.front.config.retry_after_seconds
        await self._respond(error_response(known, retry_after_seconds=retry, request_id=self.request_id, body=body))

    def _log_failure(self, error: BaseException) -> None:
        """Logs a traceback only for unexpected errors."""
        if isinstance(error, EngineError):
            logger.error("request %s failed: %s", self.request_id, error)
        else:
            logger.error("request %s failed: %s", self.request_id, type(error).__name__, exc_info=error)

    def _remember(self, answer: bytes | None, media_type: str) -> None:
        """Stores a complete answer for its idempotency key. Runs before the last byte is sent: the client may repeat the
        request at once. None: too large to store."""
        if self._entry is not None and answer is not None:
            self.front.idempotency.finish(self._entry, answer, media_type)

    def _forget(self) -> None:
        """Drops an incomplete answer, before the client sees that it is incomplete, for the same reason."""
        if self._key is not None and self._entry is not None and self._entry.answer is None:
            self.front.idempotency.drop(self.caller.tenant, self._key, self._entry)

    async def _generate(self, live: LiveRequest, lease: Lease) -> None:
        """Parses the body, builds the job, and answers with a stream or one JSON object."""

        def make_job() -> Job:
            body = self.front.json.parse(self.body)
            deployment = deployment_of(self.request.scope)
            return self.shape.job(body if deployment is None else {**body, "model": deployment}, self.caller)

        try:
            job = await self.front.off_loop(len(self.body), make_job, renders=self.shape.renders)
        except NothingToGenerate as known:
            await self._send_whole(known.answer)
            return
        self.body = b""
        lease.close()  # free the text: only token ids are needed from now on
        job = job.traced(traceparent_of(self.request.scope))
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

        work = generation.run(collect, lambda choice, text: collect(Piece.of_text(choice, text)))
        await while_connected(self.request.receive, work)
        pieces = [choices[choice] for choice in range(job.sequences)]
        await self._send_whole(self.shape.whole(job, pieces, generation.usage))

    async def _send_whole(self, answer: dict[str, Any]) -> None:
        """Sends the answer as one JSON object, in parts, and stores it under its idempotency key if there is one."""
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
            drop_connection(self.request.scope)  # unread bytes are not kept for the client
            raise
        finally:
            sent.close()

    async def _stream(self, job: Job, generation: Generation, lease: Lease) -> None:
        """Streams the answer event by event, and stores it under its idempotency key if there is one."""
        buffer = SendBuffer(self.front.limits.send_buffer_bytes, lease)
        sent = self.front.idempotency.recording()

        def put_and_keep(content: bytes) -> None:
            sent.add(content)
            buffer.put(content)

        events = self.shape.events(job, generation, buffer.put if self._entry is None else put_and_keep)
        media_type = self._dialect.stream_type
        stream = EventStream(
            self.request.scope,
            self.request.receive,
            self._send,
            headers={**self._headers, "content-type": media_type, "cache-control": "no-cache", "x-accel-buffering": "no"},
            keep_alive_seconds=self.front.config.keep_alive_seconds,
            write_seconds=self.front.limits.write_seconds,
            turn=self.front.turn,
            dialect=self._dialect,
            error_event=self._error_event,
        )

        async def produce() -> None:
            try:
                await generation.run(events.add, events.add_text)
                events.end()
                self._remember(sent.content, media_type)
            finally:
                sent.close()
                self._forget()

        await stream.run(buffer, produce)
        if stream.error is not None:
            self._log_failure(stream.error)
            raise ClientGone("failed")

    def _error_event(self, error: ApiError) -> bytes:
        body = self._dialect.error_body(error, self.request_id)
        return self.shape.error_event(body) or self._dialect.error_event(body)

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
