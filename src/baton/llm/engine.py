"""`LLM`: a call, from its prompts to its answers.

    prompts -> GenerateRequest -> Instance (core/) -> StepPlan -> ModelRunner (worker/) -> StepResult -> Emit -> Answer

One call at a time: the machine, the runner and its kernels serve one caller. An interrupted call leaves a new machine and the
loaded model, so that the next call starts clean.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from secrets import randbits
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from msgspec import ValidationError, msgpack, structs

from baton.config import QueueConfig, ServeConfig, lowered_context
from baton.core.effects import Effect, Refuse, RestartWorker, RunStep
from baton.core.events import Abort, StepDone, Submit, WorkerReady
from baton.core.instance import Instance
from baton.errors import CallerError, InvalidConfig, RequestRefused, Unavailable
from baton.llm.call import ClientCall
from baton.llm.keywords import serve_settings
from baton.llm.outputs import Classification, Embedding, PairScore, SequenceAnswer
from baton.llm.prompts import Chats, Prompts, batch_of, chats_of
from baton.llm.sampling import SamplingParams, wire_params
from baton.llm.scores import CHARACTERS_PER_TOKEN, PairScores, classes_of
from baton.llm.stream import AnswerStream
from baton.models.aliases import stops_repetitions
from baton.models.download import Listener
from baton.models.names import DEFAULT_MODEL, resolve, with_draft_files
from baton.models.support import refuse_unsupported
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import POOLINGS, FinishReason, GenerateRequest, Pooling
from baton.protocol.request import SamplingParams as WireParams
from baton.protocol.step import StepPlan
from baton.text.chat_prompt import render_chat
from baton.text.loading import load_model_text
from baton.text.pair_scores import PairModel
from baton.text.parsers.styles import answer_style
from baton.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # numpy is imported with the model
    from baton.worker.in_flight_step import InFlightStep

log = logging.getLogger(__name__)

ONE_AT_A_TIME = (
    "this LLM is answering another call: use it from one thread at a time, read a stream to its end or close it, and give it "
    "all prompts in one call, where they are batched; for many callers at once there is `baton serve`"
)

CHAT_OPTIONS = frozenset({"add_generation_prompt", "continue_final_message", "tools", "documents"})

Sampling = WireParams | Sequence[WireParams] | None
Progress = Callable[[int, int], None]


def _draft_files(name: str) -> Path:
    path = resolve(name, listener=Listener(_announce))
    refuse_unsupported(path)
    return path


def _announce(what: str) -> None:
    """Prints to stderr: a script that downloads for minutes without a line seems to hang."""
    print(f"baton: {what}", file=sys.stderr, flush=True)


class LLM:
    def __init__(self, model: str = DEFAULT_MODEL, *, seed: int | None = None, **settings: Any) -> None:
        """`settings`: fields of baton.config.ServeConfig (max_num_seqs, kv_blocks, block_size, threads, ...), also under vLLM's
        names (keywords.py). With a `seed` the same calls in the same order draw the same tokens."""
        from baton.worker.build import build_worker  # imports numpy, and torch if the forward pass needs it

        # Only the time until all prompts are done matters: no client waits for single tokens.
        settings = {"prefill_tokens_beside_decodes": 0, "decode_gap_ms": 0.0, **serve_settings(settings)}
        asked = ServeConfig(model=str(model), **settings)  # refuses bad settings before a model is downloaded
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (size := getattr(asked, name)) > 1:
                raise InvalidConfig(f"{name} is {size}, and LLM computes in one process: use baton serve")
        path = str(resolve(model, revision=asked.revision, listener=Listener(_announce)))
        refuse_unsupported(Path(path))  # before errors about its tokenizer
        speculate = with_draft_files(asked.speculate, _draft_files)
        self.config = replace(asked, model=path, speculate=speculate)
        engine = self.config.engine()
        text = load_model_text(path)
        self.tokenizer, self.chat_template = text.tokenizer, text.chat_template
        built = build_worker(engine.worker, tokenizer=self.tokenizer)
        self._runner = built.runner
        self.context_tokens = built.context_tokens
        "Maximum length of a sequence, prompt and output: the model's context, or what the KV pool holds if that is less."
        self.sampling_defaults = built.sampling_defaults
        self._stop_on_repetition = (
            stops_repetitions(Path(path)) if asked.stop_on_repetition is None else asked.stop_on_repetition
        )
        self.pooling = built.pooling
        self.scoring = built.scoring
        "How the model scores a pair of texts (models/scoring.py). Empty: it cannot."
        self.labels = built.labels
        "Names of the classes of a model that classifies."
        self.generates = built.generates
        "Whether the model generates. False: it is an encoder, for `embed`, `score` or `classify`."
        self._identity = built.identity
        if (words := lowered_context(self.config, self.context_tokens, self._runner.config.context_tokens_max)) is not None:
            log.warning(words)
        steps: dict[str, Any] = built.steps
        # There are no other clients to protect: the queue is unbounded, and no slow step is aborted.
        self._instance_config = replace(
            engine.instance,
            kv=replace(engine.instance.kv, blocks=self._runner.pool.blocks),
            scheduler=replace(engine.instance.scheduler, step_seconds_max=inf, **steps),
            queue=QueueConfig(requests_max=sys.maxsize, tokens_max=sys.maxsize),
        )
        self._numbers = count()
        self._seeds = None if seed is None else Random(seed)
        self._closed = False
        self._in_use = Lock()
        "Lock held while a call runs. No thread waits for it."
        self._open_stream: ReferenceType[AnswerStream] | None = None
        self._begin()

    def _begin(self) -> None:
        """Creates a machine without requests, and empties the runner's slots. The model and the memory of the pool stay."""
        self._plans: deque[StepPlan] = deque()
        self._in_flight: deque[InFlightStep] = deque()
        "Launched steps whose results are not collected yet."
        self._call = ClientCall()
        self._runner.clear()
        self.instance = Instance(self._instance_config)
        self._dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(1), self._identity))

    def close(self) -> None:
        """Releases the KV pool and ends an open stream. No call is possible afterwards."""
        if self._closed:
            return
        if self._open_stream is not None and (stream := self._open_stream()) is not None:
            stream.close()
        self._enter_call()  # never released, so that later calls raise
        self._closed = True
        self._runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    # Calls

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        n: int | None = None,
        progress: Progress | None = None,
        use_tqdm: bool = False,
    ) -> list[SequenceAnswer]:
        """Answers in the order of the prompts, which are batched. `sampling_params` default to the model's, and max_tokens to
        128. Raises if another call runs, from another thread or from `progress`. `use_tqdm` is vLLM's and has no effect: use
        `progress`."""
        del use_tqdm
        return list(self._answered(prompts, sampling_params, n, progress).answers.values())

    def embed(
        self, prompts: Prompts, *, pooling: Pooling | None = None, progress: Progress | None = None, use_tqdm: bool = False
    ) -> list[Embedding]:
        """One vector of length 1 per prompt, as /v1/embeddings: mean, last or first (`cls`) of the hidden states. None: the
        pooling of the model's files, else mean."""
        del use_tqdm
        how = pooling or self.pooling
        if how not in POOLINGS:
            raise InvalidConfig(
                f"the model's files want embeddings pooled by {how}: give pooling, one of {', '.join(POOLINGS)}"
            )
        call = self._answered(prompts, WireParams(max_tokens=1, pooling=how), 1, progress)
        return [Embedding.of(answer, call.vectors.get(request, b"")) for request, answer in call.answers.items()]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str = "",
        truncate_prompt_tokens: int | None = None,
        progress: Progress | None = None,
        use_tqdm: bool = False,
    ) -> list[PairScore]:
        """One score per pair, as /score: one text of `data_1` is paired with every text of `data_2`. For rerankers and
        embedding models. A pair that does not fit the context raises; `truncate_prompt_tokens` cuts it (-1: to what fits)."""
        del use_tqdm
        scored = PairScores(self._pair_model(), instruction, truncate_prompt_tokens)
        prompts = scored.prompts(data_1, data_2)
        call = self._answered(prompts, scored.sampling, 1, progress) if prompts else ClientCall()
        return scored.scores(call)

    def classify(self, prompts: Prompts, *, progress: Progress | None = None, use_tqdm: bool = False) -> list[Classification]:
        """The probabilities of the model's classes for each prompt, as /classify."""
        del use_tqdm
        if not self.labels:
            raise CallerError("the model has no classes: load a model for sequence classification")
        every = WireParams(max_tokens=1, pooling="cls", label_ids=tuple(range(len(self.labels))))
        return classes_of(self._answered(prompts, every, 1, progress), self.labels, self.scoring)

    def _pair_model(self) -> PairModel:
        return PairModel(
            name=self.config.model,
            tokenizer=self.tokenizer,
            context_tokens=self.context_tokens,
            head_width=self._runner.config.vocab_size,
            scoring=self.scoring,
            pooling=self.pooling,
            generates=self.generates,
            characters_per_token=CHARACTERS_PER_TOKEN,
        )

    def _answered(self, prompts: Prompts, sampling: Sampling, n: int | None, progress: Progress | None) -> ClientCall:
        self._enter_call()
        try:
            call = self._call
            self._submit_all(prompts, sampling, n)
            self._run(len(call.answers), progress)
            self._call = ClientCall()
            return call
        except BaseException:
            self._begin()  # the interrupted call leaves no state behind
            raise
        finally:
            self._in_use.release()

    def stream(self, prompts: Prompts, sampling_params: Sampling = None, *, n: int | None = None) -> AnswerStream:
        """Answers as an iterator of `Chunk`, over all prompts and outputs. Bad arguments raise here, before the first chunk."""
        self._enter_call()
        try:
            self._call = ClientCall(streamed=True)
            self._submit_all(prompts, sampling_params, n)
            stream = AnswerStream(self._call.chunks, self._step, self._end_stream)
            self._open_stream = ref(stream)
            return stream
        except BaseException:
            self._end_stream(whole=False)
            raise

    def chat(
        self,
        messages: Chats,
        sampling_params: Sampling = None,
        *,
        n: int | None = None,
        progress: Progress | None = None,
        use_tqdm: bool = False,
        **options: Any,
    ) -> list[SequenceAnswer]:
        """Answers of lists of messages, or a single one, as of `generate`. `options`: those of a chat template
        (add_generation_prompt, continue_final_message, tools, chat_template_kwargs)."""
        rendered = self._rendered(messages, **options)
        return self.generate(rendered, sampling_params, n=n, progress=progress, use_tqdm=use_tqdm)

    def stream_chat(
        self, messages: Chats, sampling_params: Sampling = None, *, n: int | None = None, **options: Any
    ) -> AnswerStream:
        """Answers of lists of messages, or a single one, as of `stream`."""
        return self.stream(self._rendered(messages, **options), sampling_params, n=n)

    def _rendered(
        self, messages: Chats, *, chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> list[list[int]]:
        if unknown := sorted(options.keys() - CHAT_OPTIONS):
            known = ", ".join(sorted(CHAT_OPTIONS))
            raise CallerError(f"chat has no option {', '.join(unknown)}: there are chat_template_kwargs, {known}")
        if options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", False)
        in_words = not answer_style(self.chat_template.sources).template_knows_tools
        prompts = []
        for chat in chats_of(messages):
            text, mark = render_chat(
                self.chat_template,
                self.tokenizer,
                chat,
                tools_in_words=in_words,
                extras=chat_template_kwargs,
                **options,
            )
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False, parse_special=True, mark=mark))
        return prompts

    def _enter_call(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise CallerError("this LLM is closed" if self._closed else ONE_AT_A_TIME)

    def _end_stream(self, whole: bool) -> None:
        try:
            if whole:
                self._call = ClientCall()
            else:
                self._begin()
        finally:
            self._in_use.release()

    # Requests

    def _submit_all(self, prompts: Prompts, sampling: Sampling, n: int | None) -> None:
        batch = batch_of(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise CallerError(f"{len(batch)} prompts and {len(each)} sampling parameters")
        requests = [self._request(prompt, params, n) for prompt, params in zip(batch, each, strict=True)]
        for request, prompt, params in zip(requests, batch, each, strict=True):
            self._call.add(request, prompt if isinstance(prompt, str) else None, params, self.tokenizer)
            self._dispatch(Submit(request))
            if request.id in self._call.refused:
                raise RequestRefused(self._call.refused[request.id])

    def _request(self, prompt: str | Sequence[int], asked: WireParams, n: int | None) -> GenerateRequest:
        if not self.generates and getattr(asked, "pooling", None) is None:
            raise CallerError("the model is an encoder, which generates no text: use embed, score or classify")
        tokens = tuple(self._ids(prompt) if isinstance(prompt, str) else prompt)
        room = self.context_tokens - len(tokens)
        if not tokens or room < 1:
            raise CallerError(f"a prompt of {len(tokens)} tokens; 1 to {self.context_tokens - 1} fit the context")
        stops = self._stop_on_repetition
        sampling = wire_params(asked, self.sampling_defaults, self._next_seed(), self.tokenizer, stop_on_repetition=stops)
        if sampling.min_tokens > sampling.max_tokens:
            raise CallerError(f"min_tokens is {sampling.min_tokens}, and max_tokens {sampling.max_tokens}")
        sampling = structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        n = n if n is not None else asked.n if isinstance(asked, SamplingParams) else 1
        request = GenerateRequest(id=RequestId(f"llm-{next(self._numbers)}"), prompt=tokens, sampling=sampling, n=n)
        try:
            return msgpack.decode(msgpack.encode(request), type=GenerateRequest)  # validates the fields, as a wire would
        except (ValidationError, OverflowError) as error:
            raise CallerError(str(error)) from None

    def _ids(self, text: str) -> list[int]:
        """Token ids of a prompt. An encoder cuts texts that are too long, as sentence-transformers does."""
        if self.generates:
            return self.tokenizer.encode(text)
        before, after = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        room = max(self.context_tokens - 1 - len(before) - len(after), 0)
        return [*before, *self.tokenizer.encode_beginning(text, room, parse_special=True), *after]

    def _next_seed(self) -> int:
        return randbits(63) if self._seeds is None else self._seeds.getrandbits(63)

    # Steps

    def _run(self, count: int, progress: Progress | None) -> None:
        done = -1
        while self._step():
            if progress is not None and count - len(self.instance.board.groups) != done:
                done = count - len(self.instance.board.groups)
                progress(done, count)

    def _step(self) -> bool:
        """Collects one step after launching the next ones. Returns False if there is none."""
        if not self._plans and not self._in_flight:
            return False
        self._launch()
        in_flight = self._in_flight.popleft()
        self._runner.finish(in_flight)
        if self._runner.steps_ahead > 1:
            self._launch()  # a step that waited for these tokens does not wait until they are delivered
        self._dispatch(StepDone(in_flight.result()))
        stopped, self._call.stopped = self._call.stopped, []
        for request, index in stopped:
            self._dispatch(Abort(request, index, FinishReason.STOP))
        return True

    def _launch(self) -> None:
        while self._plans and not self._runner.must_wait(self._plans[0]):
            self._in_flight.append(self._runner.submit(self._plans.popleft()))
        if self._plans:
            self._runner.apply(self._plans[0])

    def _dispatch(self, event: Any) -> None:
        for effect in self.instance.handle(event, Instant(monotonic())):
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                self._plans.append(plan)
            case Emit():
                self._on_emit(effect)
            case Refuse(request, refused):
                self._call.refused[request] = str(refused)
            case RestartWorker(_, _, reason):
                raise Unavailable(f"the model cannot go on: {reason}")

    def _on_emit(self, emit: Emit) -> None:
        self._call.on_emit(emit)
