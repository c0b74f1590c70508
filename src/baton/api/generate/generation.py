"""Runs the engine requests of one HTTP request and passes each piece to a sink as it arrives.

The sink is a plain function and never waits, so a slow client delays neither the engine nor the other prompts. Every wait here
ends: the engine gets the request's deadline, and if it is silent a few seconds after that, the front ends the request itself.
Leaving in any way (an error, a cancelled task, a lost client) aborts the unfinished requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.errors import ApiError
from baton.api.front import Front
from baton.api.generate.engine_client import Begun, Delta, Ended, TokenLogprob
from baton.api.generate.live import LiveRequest
from baton.api.generate.output import Piece, SequenceOutput
from baton.api.generate.prepare import Job
from baton.errors import Unavailable
from baton.protocol.request import FinishReason

Sink = Callable[[Piece], None]
TextSink = Callable[[int, str], None]
"""Sink of text, called with the choice and its new text."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    "Prompt tokens that were cached. None until the engine has reported it for every prompt."
    host_tokens: int = 0
    storage_tokens: int = 0
    "Cached tokens that were loaded from host memory and from storage."
    preemptions: int = 0
    "Number of times that sequences of the request lost their KV blocks to others and were computed again."
    drafted_tokens: int = 0
    "Draft tokens that were verified (speculative decoding)."
    accepted_tokens: int = 0
    "Draft tokens that were accepted: they are among the output tokens."
    reasoning_tokens: int | None = None
    "Output tokens that are reasoning. None where reasoning is not separated."
    prompt_seconds: float = 0.0
    "Seconds from the request to its first token."
    output_seconds: float = 0.0
    "Seconds from the first token to the last."


class _Timing:
    """Arrival times of the tokens of one sequence."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.tokens = 0


class Generation:
    def __init__(self, front: Front, job: Job, live: LiveRequest, started: float) -> None:
        """`started`: the loop's time at which the HTTP request arrived."""
        self._text_sink: TextSink | None = None
        n = self._n = job.options.n
        self._front = front
        self._job = job
        self._live = live
        self._started = started
        self._outputs = [
            SequenceOutput(front.tokenizer, job, request, place * n + index)
            for place, request in enumerate(job.requests)
            for index in range(n)
        ]
        self._timings = [_Timing() for _ in self._outputs]
        self._cached: dict[int, tuple[int, int, int]] = {}
        "Cached tokens per prompt, and how many of them host and storage supplied."
        self._ended: dict[int, Ended] = {}
        "Ends of the choices, as the engine reports them."
        self._prefill_seconds: dict[int, float] = {}
        "Seconds from a prompt's admission to its first token, per prompt."
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        "Log-probabilities of each prompt, where it is echoed."
        self._now = asyncio.get_running_loop().time

    @property
    def usage(self) -> Usage:
        """Usage so far. A prompt counts once, however many sequences share it."""
        all_reported = len(self._cached) == len(self._job.requests)
        first = min((timing.first for timing in self._timings if timing.first is not None), default=self._started)
        last = max(first, *(timing.last for timing in self._timings))
        ended = self._ended.items()
        cached, host, storage = (sum(column) for column in zip((0, 0, 0), *self._cached.values(), strict=True))
        return Usage(
            prompt_tokens=sum(len(request.prompt) for request in self._job.requests),
            output_tokens=sum(output.tokens for output in self._outputs),
            cached_tokens=cached if all_reported else None,
            host_tokens=host,
            storage_tokens=storage,
            preemptions=sum(end.preemptions for _, end in ended),
            drafted_tokens=sum(end.drafted_tokens for _, end in ended),
            accepted_tokens=sum(self._outputs[choice].accepted_drafts(end) for choice, end in ended),
            reasoning_tokens=sum(output.reasoning_tokens for output in self._outputs) if self._job.thinks else None,
            prompt_seconds=first - self._started,
            output_seconds=last - first,
        )

    @property
    def finish_words(self) -> str:
        """Finish reasons of the choices, for the log."""
        words = {output.finish.value if output.finish is not None else "unfinished" for output in self._outputs}
        return "+".join(sorted(words))

    async def run(self, sink: Sink, text_sink: TextSink | None = None) -> None:
        """Runs all requests until every choice has its finish. Raises ApiError, EngineRefused or another EngineError.

        `text_sink`, if given, gets deltas that carry only text: most tokens, so this is the fast path.
        """
        self._text_sink = text_sink if self._job.only_text else None
        self._live.engine_ids += [request.id for request in self._job.requests]
        if self._live.aborted:  # aborted during preparation: the engine never gets the request
            for output in self._outputs:
                sink(output.cut(FinishReason.ABORT))
            return
        if len(self._job.requests) == 1:
            await self._follow(0, sink)
            return
        places = iter(range(len(self._job.requests)))

        async def one_after_another() -> None:
            for place in places:  # shared iterator: the next free task takes the next prompt
                if self._live.aborted:
                    for output in self._of(place):
                        sink(output.cut(FinishReason.ABORT))
                else:
                    await self._follow(place, sink)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(self._job.requests), self._front.limits.choices)):
                    group.create_task(one_after_another())
        except BaseExceptionGroup as errors:  # one task failed, which cancelled the others: its error is the answer
            raise errors.exceptions[0] from None

    async def _follow(self, place: int, sink: Sink) -> None:
        """Runs one engine request, and passes its deltas to the sink until its deadline and a few seconds of grace have
        passed."""
        request = self._job.requests[place]
        grace = self._front.limits.engine_grace_seconds
        deadline = self._now() + (request.timeout_seconds or self._front.limits.request_seconds) + grace
        owed, all_finished, text_sink, asked = request.n, False, self._text_sink, self._now()

        def take(delta: Delta) -> None:
            nonlocal owed, all_finished
            if delta.begun is not None:
                self._record_begun(place, delta.begun, self._now() - asked)
            if text_sink is not None and delta.ended is None and delta.tokens:
                self._on_text(place * self._n + delta.index, delta.tokens, text_sink)
                return
            finished = self._on_delta(place, delta, sink)
            if delta.ended is not None:
                owed -= 1
            if owed and finished and not all_finished and self._all_finished(place):
                all_finished = True  # ended by stop strings; the engine still owes the usage, but gets only a short wait
                patience.reschedule(min(deadline, self._now() + grace))

        try:
            async with asyncio.timeout_at(deadline) as patience:
                await self._front.engine.generate(request, take)
            if owed:
                raise Unavailable("the engine ended the request without an answer")
        except TimeoutError:
            self._end_at_deadline(place, sink)
        finally:
            if owed:
                self._front.engine.abort(request.id)
        self._report_ended(place)

    def _on_text(self, choice: int, tokens: list[int], text_sink: TextSink) -> None:
        """Handles a delta of text only. This fast path of `_on_delta` gets nearly every token of a stream: Job.only_text, and
        not the end."""
        self._clock(choice, len(tokens))
        if text := self._outputs[choice].text_of(tokens):
            text_sink(choice, text)

    def _on_delta(self, place: int, delta: Delta, sink: Sink) -> bool:
        """Pass the delta's output to the sink. Returns True if the client has all of this sequence."""
        choice = place * self._n + delta.index
        output = self._outputs[choice]
        if delta.ended is not None:
            self._record_cached(place, delta.ended)
            self._ended[choice] = delta.ended
            self._front.metrics.sequence_ended(delta.ended)
        if output.finish is not None:
            return True
        if delta.tokens:
            self._clock(choice, len(delta.tokens))
        if self._job.echo and (output.tokens == 0 and self._timings[choice].tokens == len(delta.tokens)):
            self._echo(place, choice, delta, sink)
        piece = output.feed(delta)
        if output.finish is None:
            sink(piece)
            return False
        if delta.ended is None:
            self._front.engine.abort(self._job.requests[place].id, delta.index, FinishReason.STOP)
        self._require_no_failure(piece, delta)
        sink(piece)
        return True

    def _record_begun(self, place: int, begun: Begun, seconds: float) -> None:
        """Record that the sequence has begun. `seconds`: time since the engine was called. The part before prefill was spent in
        queues, a router's too."""
        self._record_cached(place, begun)
        if place not in self._prefill_seconds:
            self._prefill_seconds[place] = prefill = min(begun.prefill_seconds, seconds)
            self._front.metrics.request_begun(seconds - prefill, prefill)

    def _record_cached(self, place: int, report: Begun | Ended) -> None:
        """Record cached tokens: the minimum over the sequences, because siblings compute tokens for each other that were not
        cached before."""
        counts = (report.cached_tokens, report.host_tokens, report.storage_tokens)
        self._cached[place] = min(self._cached.get(place, counts), counts)

    def _echo(self, place: int, choice: int, delta: Delta, sink: Sink) -> None:
        """Sends the prompt first. Its log-probabilities arrive with sequence 0 and belong to all sequences."""
        logprobs = delta.prompt_logprobs
        if delta.index:
            logprobs = self._prompt_logprobs.get(place)
        elif logprobs is not None:
            self._prompt_logprobs[place] = logprobs
        sink(self._outputs[choice].echo(logprobs))

    def _require_no_failure(self, piece: Piece, delta: Delta) -> None:
        """Raises ApiError for an end that the client must not mistake for an answer."""
        if piece.finish is FinishReason.ERROR:
            detail = delta.ended.detail if delta.ended else ""
            if delta.ended and delta.ended.error == "dead_end":
                raise ApiError(400, detail, code="dead_end")
            raise ApiError(500, detail or "the engine could not go on with this request", code="engine_error")
        if piece.finish is FinishReason.TIMEOUT and not any(output.tokens for output in self._outputs):
            raise self._too_late()

    def _too_late(self) -> ApiError:
        seconds = self._job.options.timeout_seconds
        return ApiError(504, f"no token within the request's {seconds:g} seconds", param="timeout", code="timeout")

    def _end_at_deadline(self, place: int, sink: Sink) -> None:
        """Ends the choices with their present output: the engine is silent past the deadline."""
        if not any(output.tokens for output in self._outputs):
            raise self._too_late()
        for output in self._of(place):
            if output.finish is None:
                sink(output.cut(FinishReason.TIMEOUT))

    def _of(self, place: int) -> list[SequenceOutput]:
        n = self._n
        return self._outputs[place * n : (place + 1) * n]

    def _all_finished(self, place: int) -> bool:
        return all(output.finish is not None for output in self._of(place))

    def _clock(self, choice: int, tokens: int) -> None:
        timing, now = self._timings[choice], self._now()
        if timing.first is None:
            timing.first = now
            self._front.metrics.first_token(now - self._started)
        else:
            self._front.metrics.later_tokens(now - timing.last, tokens)
        timing.last = now
        timing.tokens += tokens

    def _report_ended(self, place: int) -> None:
        n, now = self._n, self._now()
        for timing in self._timings[place * n : (place + 1) * n]:
            if timing.first is not None and timing.tokens > 1:
                self._front.metrics.time_per_output_token((timing.last - timing.first) / (timing.tokens - 1))
        times = [timing for timing in self._timings[place * n : (place + 1) * n] if timing.first is not None]
        if times and place in self._prefill_seconds:
            first, last = min(timing.first or 0.0 for timing in times), max(timing.last for timing in times)
            self._front.metrics.request_decoded(last - first, self._prefill_seconds[place])
        self._front.metrics.request_ended(now - self._started, self._job.requests[place])
