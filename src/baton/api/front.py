"""State that all routes share, made once per app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from prometheus_client.registry import Collector
from starlette.requests import Request

from baton.api.admin_orders import AdminOrders
from baton.api.config import ApiConfig, ServedModel
from baton.api.errors import ApiError
from baton.api.generate.engine_client import EngineClient
from baton.api.generate.live import LiveRequests
from baton.api.http.auth import ApiCaller
from baton.api.http.budget import ByteBudget
from baton.api.http.idempotency import IdempotencyStore
from baton.api.http.json_process import JsonProcess
from baton.api.http.streaming import EndOfTurn
from baton.api.openai.schemas import Schema
from baton.api.responses.store import ResponseStore
from baton.grammar.check_process import GrammarCheck
from baton.grammar.vocabulary_source import source_of
from baton.observe.metrics import Metrics
from baton.protocol.grammar import Grammar
from baton.text.chat_template import ChatTemplate
from baton.text.parsers.styles import answer_style
from baton.text.tokenizer import Tokenizer

T = TypeVar("T")
logger = logging.getLogger("baton.api")
"Logs events of requests, never their content."

_INLINE_BYTES = 4 * 1024
"Maximum bytes of texts that are processed faster here than through a thread."
_LARGE_BYTES = 64 * 1024


_TRIES = 3
"Attempts with a grammar: the compiled one may be evicted before it is used."


class UnknownGrammar(Exception):
    """Raised if the grammar must be compiled in another process first; then the work is repeated."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("a grammar that is not checked yet")
        self.grammar = grammar


class Front:
    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: ServedModel,
        config: ApiConfig,
        collector: Collector | None = None,
    ) -> None:
        """`collector`: metrics of the engine, where there are more than `engine.stats`."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.model = model
        self.config = config
        self.limits = config.limits
        self.schema = Schema(model, config)
        self.style = answer_style(
            template.sources,
            frozenset(tokenizer.added_ids),
            tool_calls=config.tool_call_parser,
            reasoning=config.reasoning_parser,
        )
        self.metrics = Metrics(model_name=model.name, engine_stats=engine.stats, engine=collector)
        self.live = LiveRequests(engine, config)
        self.idempotency = IdempotencyStore(config.limits)
        self.responses = ResponseStore(config.limits)
        self.orders = AdminOrders()
        self.turn = EndOfTurn()
        self.grammars = GrammarCheck(lambda: source_of(self.tokenizer, self.model.head_width)())
        self.json = JsonProcess(config.limits, model.context_tokens)
        self.budget = ByteBudget(config.limits.bytes_in_flight)
        self._threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="baton-text")
        self._large_threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="baton-large-text")
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="baton-grammars")
        self._ping: asyncio.Task[None] | None = None
        self.leaving = False
        "Whether a signal has ended readiness; requests are still accepted."

    def serve(self, model: ServedModel) -> None:
        """Requests from now on are read for this model."""
        self.model = model
        self.schema = Schema(model, self.config)

    async def off_loop(self, size_bytes: int, work: Callable[[], T], *, renders: bool = False) -> T:
        """Runs `work` here if it is small, else on a thread, so that a large request does not delay all streams.

        Large requests have threads of their own: some take seconds, and an ordinary prompt must not wait for them. The check of
        a new grammar has its own threads too: a client may send many slow ones.
        renders   `work` waits for the process of chat templates: never here
        """
        try:
            async with asyncio.timeout(self.limits.prepare_seconds):
                for _ in range(_TRIES):
                    try:
                        return await self._do(size_bytes, work, renders)
                    except UnknownGrammar as unknown:
                        await self._on_thread(self._grammar_thread, partial(self.grammars.learn, unknown.grammar))
        except TimeoutError:
            pass
        raise ApiError(503, "too many requests are being prepared", code="prepare_timeout")

    async def _do(self, size_bytes: int, work: Callable[[], T], renders: bool) -> T:
        if size_bytes <= _INLINE_BYTES and not renders:
            return work()
        return await self._on_thread(self._threads if size_bytes <= _LARGE_BYTES else self._large_threads, work)

    async def _on_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """Returns the grammar in the form that workers accept. Raises BadGrammar, and UnknownGrammar for `off_loop`."""
        if not self.grammars.knows(grammar):
            raise UnknownGrammar(grammar)
        return self.grammars.check(grammar)

    async def ping(self) -> None:
        """Check that the engine answers; raises if not. Concurrent callers share one round trip: /health is open to
        everyone."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self.engine.ping(self.limits.ping_seconds))
            # retrieve the result, even if no caller waits
            self._ping.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(self.limits.ping_seconds + 1.0):
                await asyncio.shield(self._ping)
        except TimeoutError:
            raise ApiError(503, "the engine does not answer", code="engine_stuck") from None

    def close(self) -> None:
        self.json.close()
        self.grammars.close()
        for threads in (self._threads, self._large_threads, self._grammar_thread):
            threads.shutdown(wait=False, cancel_futures=True)


def front_of(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


def caller_of(request: Request) -> ApiCaller:
    caller: ApiCaller = request.state.caller
    return caller
