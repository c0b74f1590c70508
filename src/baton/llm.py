"""`LLM`: the same machines in one process, for scripts and notebooks.

    from baton.llm import LLM, SamplingParams

    llm = LLM("smollm2")
    for answer in llm.chat([[{"role": "user", "content": "What is the capital of France?"}]]):
        print(answer.outputs[0].text)

Nothing is shared with a server: the model is loaded here, steps run when `generate` is called, and all prompts of a call are
batched continuously. Sampling that a call does not name is as the server's would be: the model's recommendation, else
OpenAI's defaults (`LLM.sampling_defaults`). `SamplingParams(temperature=0)` takes the likeliest token always.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from secrets import randbits
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from msgspec import ValidationError, msgpack, structs

from baton.config import QueueConfig, ServeConfig, lowered_context
from baton.core.effects import Effect, Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.events import StepDone, Submit, WorkerReady
from baton.errors import CallerError, RequestRefused, Unavailable
from baton.models.names import DEFAULT_MODEL, resolve
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import GenerateRequest
from baton.protocol.request import SamplingParams as WireParams
from baton.protocol.step import StepPlan, TokenLogprob
from baton.text.chat_prompt import render_chat
from baton.text.loading import load_model_text

__all__ = ["LLM", "Answer", "Output", "SamplingParams"]

if TYPE_CHECKING:  # numpy comes with the model
    from baton.worker.ticket import Ticket

log = logging.getLogger(__name__)

MAX_TOKENS = 128
"""Of an answer, where neither the call nor the model says how long it may be."""

ONE_AT_A_TIME = (
    "this LLM is answering another call: use it from one thread at a time, and give it all prompts in one call, where they are "
    "batched; for many callers at once there is `baton serve`"
)


class SamplingParams(WireParams, frozen=True, kw_only=True):
    """How tokens are drawn and when to stop. What is None, or left out, is the model's default."""

    max_tokens: int | None = None  # type: ignore[assignment]
    temperature: float | None = None  # type: ignore[assignment]
    top_k: int | None = None  # type: ignore[assignment]
    top_p: float | None = None  # type: ignore[assignment]
    min_p: float | None = None  # type: ignore[assignment]
    repetition_penalty: float | None = None  # type: ignore[assignment]
    seed: int | None = None  # type: ignore[assignment]
    "None: another one for every prompt and call."


@dataclass(slots=True)
class Output:
    """One of the n sequences of an answer."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    "stop, length, or error."
    error: str = ""
    "What went wrong, where the reason is error."
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Answer:
    prompt_token_ids: list[int]
    outputs: list[Output]
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    "By position, where they were asked for. The first token has none."


class LLM:
    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        """`settings` are the fields of baton.config.ServeConfig: slots, kv_blocks, block_size, threads, ..."""
        from baton.worker.build import build_worker  # brings numpy, and torch where the forward pass needs it

        # Nobody watches tokens come: how long one waits for other prompts does not matter here, only when all are done.
        settings = {"prefill_tokens_beside_decodes": None, "decode_gap_ms": 0.0, **settings}
        asked = ServeConfig(model=str(model), **settings)  # refuses bad settings before a model is fetched
        path = str(resolve(model))
        self.config = replace(asked, model=path)
        engine = self.config.engine()
        text = load_model_text(path)
        self.tokenizer, self.chat_template = text.tokenizer, text.chat_template
        built = build_worker(engine.worker)
        self._runner = built.runner
        self.context_tokens = built.context_tokens
        "Longest sequence, prompt and output: what the model was made for, or what the KV pool holds if that is less."
        self.sampling_defaults = built.sampling_defaults
        self._identity = built.identity
        if (words := lowered_context(self.config, self.context_tokens, self._runner.config.context_tokens_max)) is not None:
            log.warning(words)
        # Nobody else is here to be protected: any number of prompts may wait, and no step is given up for being slow.
        self._instance_config = replace(
            engine.instance,
            kv=replace(engine.instance.kv, blocks=self._runner.pool.blocks),
            scheduler=replace(engine.instance.scheduler, step_seconds_max=inf),
            queue=QueueConfig(requests_max=sys.maxsize, tokens_max=sys.maxsize),
        )
        self._numbers = count()
        self._in_use = Lock()
        "Never waited for: it says that a call is under way."
        self._begin()

    def _begin(self) -> None:
        """A machine without requests and a runner with empty slots. The model and the memory of the pool stay."""
        self._plans: deque[StepPlan] = deque()
        self._tickets: deque[Ticket] = deque()
        "Steps under way."
        self._answers: dict[RequestId, Answer] = {}
        self._refused: dict[RequestId, str] = {}
        self._runner.clear()
        self.instance = Instance(self._instance_config)
        self._tell(WorkerReady(self.instance.worker.epoch, PoolIncarnation(1), self._identity))

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: WireParams | Sequence[WireParams] | None = None,
        *,
        n: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Answer]:
        """All prompts at once; answers in the order of the prompts. What `sampling` leaves open is the model's default, and at
        most 128 tokens; without stop ids the model's end of text stops. For one call at a time: a second one, of another
        thread or of `progress`, is refused."""
        if not self._in_use.acquire(blocking=False):
            raise CallerError(ONE_AT_A_TIME)
        try:
            return self._generate(prompts, sampling, n, progress)
        finally:
            self._in_use.release()

    def _generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling: WireParams | Sequence[WireParams] | None,
        n: int,
        progress: Callable[[int, int], None] | None,
    ) -> list[Answer]:
        batch = _batch(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise CallerError(f"{len(batch)} prompts and {len(each)} sampling parameters")
        requests = [self._request(prompt, params, n) for prompt, params in zip(batch, each, strict=True)]
        try:
            for request in requests:
                self._submit(request)
            self._run(len(requests), progress)
            return [self._finished(request.id) for request in requests]
        except BaseException:
            self._begin()  # wherever it was interrupted, nothing of it is left behind
            raise

    def chat(
        self,
        chats: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: WireParams | Sequence[WireParams] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Like `generate`, for lists of messages, or a single one."""
        each: Sequence[Any] = [chats] if chats and isinstance(chats[0], Mapping) else chats
        rendered = [render_chat(self.chat_template, self.tokenizer, [dict(message) for message in chat]) for chat in each]
        prompts = [
            self.tokenizer.encode(text, add_special_tokens=False, parse_special=True, mark=mark) for text, mark in rendered
        ]
        return self.generate(prompts, sampling, **options)

    # One request

    def _request(self, prompt: str | Sequence[int], asked: WireParams, n: int) -> GenerateRequest:
        tokens = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        room = self.context_tokens - len(tokens)
        if not tokens or room < 1:
            raise CallerError(f"a prompt of {len(tokens)} tokens; 1 to {self.context_tokens - 1} fit the context")
        sampling = self._resolved(asked)
        sampling = structs.replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            stop_token_ids=sampling.stop_token_ids or tuple(self.tokenizer.eos_ids),
        )
        request = GenerateRequest(id=RequestId(f"llm-{next(self._numbers)}"), prompt=tokens, sampling=sampling, n=n)
        try:
            return msgpack.decode(msgpack.encode(request), type=GenerateRequest)  # a wire would check it so
        except (ValidationError, OverflowError) as error:
            raise CallerError(str(error)) from None

    def _resolved(self, asked: WireParams) -> WireParams:
        """With the model's defaults where nothing was asked for, and a seed."""
        given = {name: value for name, value in structs.asdict(asked).items() if value is not None}
        return WireParams(**{"max_tokens": MAX_TOKENS, "seed": randbits(63), **self.sampling_defaults, **given})

    def _submit(self, request: GenerateRequest) -> None:
        self._answers[request.id] = Answer(list(request.prompt), [Output(index) for index in range(request.n)])
        self._tell(Submit(request))
        if request.id in self._refused:
            raise RequestRefused(self._refused[request.id])

    def _finished(self, request: RequestId) -> Answer:
        answer = self._answers.pop(request)
        for output in answer.outputs:
            output.text = self.tokenizer.decode(output.token_ids)
        return answer

    # Steps

    def _run(self, count: int, progress: Callable[[int, int], None] | None) -> None:
        done = -1
        while self._plans or self._tickets:
            while self._plans and not self._runner.must_wait(self._plans[0]):
                self._tickets.append(self._runner.submit(self._plans.popleft()))
            self._tell(StepDone(self._runner.collect(self._tickets.popleft())))
            if progress is not None and count - len(self.instance.board.groups) != done:
                done = count - len(self.instance.board.groups)
                progress(done, count)

    def _tell(self, event: Any) -> None:
        for effect in self.instance.handle(event, Instant(monotonic())):
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                self._plans.append(plan)
            case Emit():
                self._on_emit(effect)
            case Refuse(request, refused):
                self._refused[request] = str(refused)
            case RestartWorker(_, _, reason):
                raise Unavailable(f"the model cannot go on: {reason}")

    def _on_emit(self, emit: Emit) -> None:
        for request, _, index, _, token in emit.tokens:
            self._answers[request].outputs[index].token_ids.append(token)
        for request, index, row in emit.logprobs:
            if row.sampled is not None:
                self._answers[request].outputs[index].logprobs.append(row.sampled)
            if index == 0:
                self._answers[request].prompt_logprobs.update(enumerate(row.prompt, row.prompt_from))
        for ended in emit.ended:
            self._on_ended(ended)

    def _on_ended(self, ended: Ended) -> None:
        output = self._answers[ended.request].outputs[ended.index]
        output.finish_reason, output.error = ended.reason.value, ended.detail
        output.cached_tokens, output.preemptions = ended.cached_tokens, ended.preemptions


def _batch(prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[str | Sequence[int]]:
    """A text or a list of token ids alone is a batch of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
