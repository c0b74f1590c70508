"""`LLM`: the same machines in one process, for scripts and notebooks.

    from baton.llm import LLM, SamplingParams

    llm = LLM("smollm2")
    for answer in llm.chat([[{"role": "user", "content": "What is the capital of France?"}]]):
        print(answer.outputs[0].text)

Nothing is shared with a server: the model is loaded here, steps run when `generate` is called, and all prompts of a call are
batched continuously.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any

import msgspec

from baton.config import ServeConfig
from baton.core.effects import Effect, Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.events import Abort, StepDone, Submit, WorkerReady
from baton.errors import CallerError, RequestRefused, Unavailable
from baton.models.names import DEFAULT_MODEL, resolve
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import StepPlan, TokenLogprob
from baton.text.loading import load_model_text

__all__ = ["LLM", "Answer", "Output", "SamplingParams"]


@dataclass(slots=True)
class Output:
    """One of the n sequences of an answer."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
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
        from baton.worker.build import build_runner  # torch is imported only here

        path = str(resolve(model))
        self.config = ServeConfig(model=path, served_model_name=model, **settings)
        engine = self.config.engine()
        text = load_model_text(path)
        self.tokenizer, self.chat_template = text.tokenizer, text.chat_template
        self._runner = build_runner(engine.worker)
        self.context_tokens = engine.worker.context_tokens_max or self._runner.config.context_tokens_max
        kv = replace(engine.instance.kv, blocks=self._runner.pool.blocks)
        self.instance = Instance(replace(engine.instance, kv=kv))
        self._plans: list[StepPlan] = []
        self._numbers = count()
        self._answers: dict[RequestId, Answer] = {}
        self._refused: dict[RequestId, str] = {}
        self._tell(WorkerReady(self.instance.worker.epoch))

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Answer]:
        """All prompts at once; answers in the order of the prompts. Without stop ids the model's end of text stops."""
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams(max_tokens=128)] * len(batch)
        if len(each) != len(batch):
            raise CallerError(f"{len(batch)} prompts and {len(each)} sampling parameters")
        ids = [self._submit(prompt, params, n) for prompt, params in zip(batch, each, strict=True)]
        try:
            self._run(ids, progress)
        finally:
            for request in ids:
                self._tell(Abort(request))  # those that an exception left behind; the others are unknown by now
        return [self._finished(request) for request in ids]

    def chat(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Like `generate`, for lists of messages."""
        rendered = [self.chat_template.render([dict(message) for message in chat]) for chat in chats]
        prompts = [self.tokenizer.encode(text, add_special_tokens=False, parse_special=True) for text in rendered]
        return self.generate(prompts, sampling, **options)

    # One request

    def _submit(self, prompt: str | Sequence[int], sampling: SamplingParams, n: int) -> RequestId:
        tokens = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        room = self.context_tokens - len(tokens)
        if not tokens or room < 1:
            raise CallerError(f"a prompt of {len(tokens)} tokens; 1 to {self.context_tokens - 1} fit the context")
        if not sampling.stop_token_ids:
            sampling = _changed(sampling, stop_token_ids=tuple(self.tokenizer.eos_ids))
        if sampling.max_tokens > room:
            sampling = _changed(sampling, max_tokens=room)
        request = RequestId(f"llm-{next(self._numbers)}")
        self._answers[request] = Answer(list(tokens), [Output(index) for index in range(n)])
        self._tell(Submit(GenerateRequest(id=request, prompt=tokens, sampling=sampling, n=n)))
        if request in self._refused:
            raise RequestRefused(self._refused.pop(request))
        return request

    def _finished(self, request: RequestId) -> Answer:
        answer = self._answers.pop(request)
        for output in answer.outputs:
            output.text = self.tokenizer.decode(output.token_ids)
        return answer

    # Steps

    def _run(self, ids: list[RequestId], progress: Callable[[int, int], None] | None) -> None:
        while self._plans:
            plan = self._plans.pop(0)
            self._tell(StepDone(self._runner.execute(plan)))
            if progress is not None:
                progress(sum(request not in self.instance.groups for request in ids), len(ids))

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
            case RestartWorker(_, reason):
                raise Unavailable(f"the model cannot go on: {reason}")

    def _on_emit(self, emit: Emit) -> None:
        for request, index, token in emit.tokens:
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
        output.finish_reason = ended.reason.value
        output.cached_tokens, output.preemptions = ended.cached_tokens, ended.preemptions


def _changed(sampling: SamplingParams, **changes: Any) -> SamplingParams:

    return msgspec.structs.replace(sampling, **changes)
