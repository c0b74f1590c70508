"""The real core and the real runner in one process: requests in, tokens out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from baton.config import InstanceConfig, KVConfig, Quantization, SchedulerConfig, WorkerConfig
from baton.core.effects import Refuse, RestartWorker, RunStep
from baton.core.events import Event, StepDone, Submit, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.grammar.vocabulary import Vocabulary
from baton.kvpool.base import Pool
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig, RopeConfig
from baton.models.decoder import Decoder
from baton.models.load import dummy_model
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import WeightSource
from baton.models.open import OpenedModel, open_model
from baton.native.build import NoCompiler
from baton.protocol.codec import decode, encode
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import RowLogprobs, StepPlan, StepResult, TokenLogprob
from baton.worker.executors.base import LoadedExecutor
from baton.worker.executors.stepwise import Stepwise
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.base import Forward
from baton.worker.grammar_masks import GrammarMasks
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform
from baton.worker.platforms.cpu import CpuPlatform
from baton.worker.ticket import Ticket

STEPS_MAX = 5000

TINY = ModelConfig(
    architecture="llama",
    vocab_size=97,
    layers=2,
    hidden_size=32,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-5,
    tied_embeddings=False,
    context_tokens_max=512,
)

SEQUENCES = [[5, 3, 60, 60, 1, 2, 9], [11], [30, 2, 7, 7]]
"""Tokens of three prompts, for one_step."""


@dataclass(frozen=True)
class RigModel:
    """Weights that are loaded once, for any number of rigs."""

    config: ModelConfig
    loaded: LoadedExecutor
    platform: Platform = field(default_factory=CpuPlatform)
    vocabulary: Callable[[], Vocabulary] | None = None
    "For requests with a grammar."


def skip_without_a_compiler(error: NoCompiler) -> NoReturn:
    """Where there is a compiler, sources that do not compile are a failure."""
    if "no C compiler" not in str(error):
        raise error
    pytest.skip(str(error))


def load(opened: OpenedModel, *, quantization: Quantization = "none", threads: int = 1, **settings: Any) -> RigModel:
    """As a worker loads it, but exact and on one thread unless told otherwise. `settings`: WorkerConfig's.

    compute="native" skips the test where there is no compiler; without it such a machine runs the test in torch.
    """
    try:
        loaded = CpuPlatform().load(opened, WorkerConfig(quantization=quantization, threads=threads, **settings))
    except NoCompiler as error:
        skip_without_a_compiler(error)
    return RigModel(opened.config, loaded)


def load_path(path: Path, **settings: Any) -> RigModel:
    return load(open_model(path), **settings)


TINY_SEED = 3
"""Gives lively answers: few tokens come twice in a row."""


def tiny_model(config: ModelConfig = TINY, weights: WeightSource | None = None, **settings: Any) -> RigModel:
    weights = weights or DummyWeights(config, TINY_SEED)
    return load(OpenedModel(Path(), config, weights), **settings)


def tiny_oracle(config: ModelConfig = TINY) -> Decoder:
    """The same weights in torch."""
    return dummy_model(config, seed=TINY_SEED)


def make_pool(model: RigModel, *, blocks: int, block_size: int) -> Any:
    """Full of not-a-number, whatever the type: who reads what nobody has written is found out."""
    pool = model.platform.create_pool(kv_layout(model.config, block_size, model.loaded.kv), blocks)
    if isinstance(pool, KVPool):
        pool.data.view(np.uint8).fill(0xFF)
    else:
        from baton.worker.attention.pool_tensors import device_tensor

        device_tensor(pool).fill_(float("nan"))
    return pool


def make_runner(model: RigModel, pool: Pool, *, slots: int) -> ModelRunner:
    return ModelRunner(model.loaded.with_pool(pool), pool, slots=slots, grammars=GrammarMasks(model.vocabulary))


def forward_of(model: RigModel) -> Forward:
    executor = model.loaded.with_pool(make_pool(model, blocks=16, block_size=4))
    assert isinstance(executor, Stepwise)
    return executor.forward


def one_step(sequences: list[list[int]], block_size: int = 4) -> FlatBatch:
    """Every sequence as a whole, each in blocks of its own."""
    counts = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *counts]).astype(np.int64)
    width = -(-max(counts) // block_size)
    tables = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    spans = Spans(tables, np.arange(len(counts)), starts, np.zeros(len(counts), np.int64))
    positions = np.concatenate([np.arange(count) for count in counts])
    return FlatBatch(spans, np.concatenate(sequences).astype(np.int32), positions, np.ones(len(counts), bool))


class Rig:
    def __init__(
        self,
        model: RigModel,
        *,
        slots: int = 8,
        blocks: int = 256,
        block_size: int = 4,
        chunk: int | None = None,
        tokens_per_step: int = 4096,
        steps_in_flight: int = 2,
    ) -> None:
        scheduler = SchedulerConfig(
            slots=slots, chunk_tokens_max=chunk, tokens_per_step=tokens_per_step, steps_in_flight=steps_in_flight
        )
        self.instance = Instance(InstanceConfig(kv=KVConfig(blocks=blocks, block_size=block_size), scheduler=scheduler))
        self._new_runner = lambda: make_runner(model, make_pool(model, blocks=blocks, block_size=block_size), slots=slots)
        self.runner = self._new_runner()
        self.plans: deque[StepPlan] = deque()
        self.tickets: deque[Ticket] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.history: list[tuple[StepPlan, StepResult]] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], Ended] = {}
        self.logprobs: dict[tuple[str, int], list[RowLogprobs]] = defaultdict(list)
        self._dying = False
        self._pools = 1
        self.tell(WorkerReady(self.instance.worker.epoch, PoolIncarnation(self._pools)))

    def tell(self, event: Event) -> None:
        for effect in self.instance.handle(event, Instant(0.0)):
            match effect:
                case RunStep(plan):
                    self.plans.append(decode(encode(plan)))
                case Emit(tokens, ended, logprobs):
                    for request, _, index, _, token in each_token(tokens):
                        self.tokens[request, index].append(token)
                    for request, index, row in logprobs:
                        self.logprobs[request, index].append(row)
                    self.ended.update({(end.request, end.index): end for end in ended})
                case RestartWorker() if self._dying:
                    self._dying = False
                case Refuse() | RestartWorker():
                    raise AssertionError(effect)

    def kill_worker(self) -> None:
        """It dies with the plans that it was given; its successor knows nothing and starts with another pool."""
        self.plans.clear()
        self.tickets.clear()
        self.runner.close()
        self.runner = self._new_runner()
        self._dying = True
        self.tell(WorkerLost(self.instance.worker.epoch, cause="killed"))
        self._pools += 1
        self.tell(WorkerReady(self.instance.worker.epoch, PoolIncarnation(self._pools)))

    def submit(self, name: str, prompt: list[int], *, n: int = 1, priority: int = 0, **sampling: Any) -> None:
        params = SamplingParams(**sampling)
        self.prompts[name] = prompt
        self.tell(Submit(GenerateRequest(id=RequestId(name), prompt=tuple(prompt), sampling=params, n=n, priority=priority)))

    def step(self) -> bool:
        """As many steps as may be ahead are launched, and the result of the oldest is taken in. False: there is none."""
        while self.plans and not self.runner.must_wait(self.plans[0]):
            self.tickets.append(self.runner.submit(self.plans.popleft()))
        if not self.tickets:
            return False
        ticket = self.tickets.popleft()
        result = decode(encode(self.runner.collect(ticket)))
        self.history.append((ticket.plan, result))
        self.tell(StepDone(result))
        return True

    def run(self, disturb: Callable[[int], None] | None = None) -> dict[tuple[str, int], list[int]]:
        """Until nothing is left to do. `disturb` is told the number of each step before it happens."""
        for number in range(STEPS_MAX):
            if disturb is not None:
                disturb(number)
            if not self.step():
                break
        else:
            raise AssertionError("the rig does not come to rest")
        self.instance.check()
        assert not self.instance.board.groups
        return dict(self.tokens)

    def words(self, name: str, index: int = 0) -> dict[int, TokenLogprob]:
        """What was said of each position, prompt and output, where it was asked for. What is said twice is said alike."""
        rows = self.logprobs[name, index]
        said: dict[int, TokenLogprob] = {}
        for row in rows:
            for position, word in enumerate(row.prompt, row.prompt_from):
                assert said.setdefault(position, word) == word
        output_from = len(self.prompts[name])
        return said | dict(enumerate((row.sampled for row in rows if row.sampled is not None), output_from))

    def close(self) -> None:
        self.runner.close()


def generate(model: RigModel, prompts: dict[str, list[int]], *, rig: dict[str, Any] | None = None, **sampling: Any):
    """Tokens of these prompts, all submitted at once."""
    one = Rig(model, **(rig or {}))
    for name, prompt in prompts.items():
        one.submit(name, prompt, **sampling)
    return one.run()
