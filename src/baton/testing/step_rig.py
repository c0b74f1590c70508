"""The real core and the real model runner in one process and one thread: requests in, tokens out.

A platform under test computes here what it would compute in a worker process, without sockets and without time: every run of
the same requests and disturbances makes the same plans.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.config import InstanceConfig, KVConfig, SchedulerConfig
from baton.core.effects import Refuse, RestartWorker, RunStep
from baton.core.events import Event, StepDone, Submit, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.grammar.vocabulary import Vocabulary
from baton.kvpool.base import Pool
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.protocol.codec import decode, encode
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import RowLogprobs, StepPlan, StepResult, TokenLogprob
from baton.worker.drafters.base import Drafter
from baton.worker.drafters.model import ModelDrafter
from baton.worker.executors.base import LoadedExecutor
from baton.worker.grammar_masks import GrammarMasks
from baton.worker.in_flight_step import InFlightStep
from baton.worker.kv_layout import kv_layout
from baton.worker.model_runner import ModelRunner
from baton.worker.platforms.base import Platform
from baton.worker.platforms.cpu import CpuPlatform

STEPS_MAX = 5000


@dataclass(frozen=True)
class RigModel:
    """Weights that are loaded once, for any number of rigs."""

    config: ModelConfig | EncoderConfig
    loaded: LoadedExecutor
    platform: Platform = field(default_factory=CpuPlatform)
    vocabulary: Callable[[], Vocabulary] | None = None
    "Tokens of the model, for requests with a grammar."


def make_pool(model: RigModel, *, blocks: int, block_size: int) -> Any:
    """A pool filled with NaN, where the host or torch can write it: a read of unwritten memory shows."""
    pool = model.platform.create_pool(kv_layout(model.config, block_size, model.loaded.kv), blocks)
    if isinstance(pool, KVPool):
        pool.data.view(np.uint8).fill(0xFF)
    elif isinstance(pool, DevicePool):
        from baton.worker.attention.pool_tensors import device_tensor

        device_tensor(pool).fill_(float("nan"))
    return pool


def make_runner(
    model: RigModel, pool: Pool, *, slots: int, drafter: Drafter | None = None, draft_model: RigModel | None = None
) -> ModelRunner:
    grammars = GrammarMasks(model.vocabulary)
    return ModelRunner(
        model.loaded.with_pool(pool),
        pool,
        slots=slots,
        grammars=grammars,
        drafter=drafter,
        draft_model=None if draft_model is None else make_model_drafter(draft_model, model, pool, slots=slots),
    )


def make_model_drafter(draft: RigModel, main: RigModel, pool: Pool, *, slots: int) -> ModelDrafter:
    """A drafter with a draft model. `pool`: of the main model."""
    own = make_pool(draft, blocks=pool.blocks, block_size=pool.layout.block_size)
    assert draft.loaded.drafting is not None
    passes = draft.loaded.drafting(own, pool.blocks * pool.layout.block_size)
    return ModelDrafter(passes, own, slots=slots, vocabulary=main.config.vocab_size)


class StepRig:
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
        drafter: Callable[[], Drafter] | None = None,
        draft_model: RigModel | None = None,
        drafts_max: int = 4,
    ) -> None:
        """`drafter`: of a worker that speculates; each life of the worker has a new one. `draft_model`: drafts too."""
        scheduler = SchedulerConfig(
            slots=slots,
            chunk_tokens_max=chunk,
            tokens_per_step=tokens_per_step,
            steps_in_flight=steps_in_flight,
            drafts_max=0 if drafter is None and draft_model is None else drafts_max,
        )
        self.instance = Instance(InstanceConfig(kv=KVConfig(blocks=blocks, block_size=block_size), scheduler=scheduler))
        self._new_runner: Callable[[], ModelRunner] = lambda: make_runner(
            model,
            make_pool(model, blocks=blocks, block_size=block_size),
            slots=slots,
            drafter=None if drafter is None else drafter(),
            draft_model=draft_model,
        )
        self.runner = self._new_runner()
        self.plans: deque[StepPlan] = deque()
        self.in_flight_steps: deque[InFlightStep] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.history: list[tuple[StepPlan, StepResult]] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], Ended] = {}
        self.logprobs: dict[tuple[str, int], list[RowLogprobs]] = defaultdict(list)
        self._dying = False
        self._pools = 1
        self.dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(self._pools)))

    def dispatch(self, event: Event) -> None:
        """Dispatches the event to the instance, and performs its effects. Plans pass through the codec, as between
        processes."""
        for effect in self.instance.handle(event, Instant(0.0)):
            match effect:
                case RunStep(plan):
                    self.plans.append(_over_the_wire(plan))
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
        """Ends the worker and its plans; its successor starts with another pool."""
        self.plans.clear()
        self.in_flight_steps.clear()
        self.runner.close()
        self.runner = self._new_runner()
        self._dying = True
        self.dispatch(WorkerLost(self.instance.worker.epoch, cause="killed"))
        self._pools += 1
        self.dispatch(WorkerReady(self.instance.worker.epoch, PoolIncarnation(self._pools)))

    def submit(self, name: str, prompt: list[int], *, n: int = 1, priority: int = 0, **sampling: Any) -> None:
        params = SamplingParams(**sampling)
        self.prompts[name] = prompt
        request = GenerateRequest(id=RequestId(name), prompt=tuple(prompt), sampling=params, n=n, priority=priority)
        self.dispatch(Submit(request))

    def step(self) -> bool:
        """Launches steps up to steps_ahead, and absorbs the result of the oldest. Returns False if there is none."""
        self._launch()
        if not self.in_flight_steps:
            return False
        in_flight = self.in_flight_steps.popleft()
        self.runner.finish(in_flight)
        if self.runner.steps_ahead > 1:
            self._launch()
        result = _over_the_wire(in_flight.result())
        self.history.append((in_flight.plan, result))
        self.dispatch(StepDone(result))
        return True

    def _launch(self) -> None:
        while self.plans and not self.runner.must_wait(self.plans[0]):
            self.in_flight_steps.append(self.runner.submit(self.plans.popleft()))
        if self.plans:
            self.runner.apply(self.plans[0])

    def run(self, disturb: Callable[[int], None] | None = None) -> dict[tuple[str, int], list[int]]:
        """Runs until nothing is left. `disturb` is called with the number of each step before it."""
        for number in range(STEPS_MAX):
            if disturb is not None:
                disturb(number)
            if not self.step():
                break
        else:
            raise AssertionError(f"requests are open after {STEPS_MAX} steps")
        self.instance.check()
        assert not self.instance.board.groups
        return dict(self.tokens)

    def token_logprobs(self, name: str, index: int = 0) -> dict[int, TokenLogprob]:
        """Log-probabilities by position of prompt and output, if requested. A repeated position must be equal."""
        rows = self.logprobs[name, index]
        found: dict[int, TokenLogprob] = {}
        for row in rows:
            for position, logprob in enumerate(row.prompt, row.prompt_from):
                assert found.setdefault(position, logprob) == logprob
        output_from = len(self.prompts[name])
        return found | dict(enumerate((row.sampled for row in rows if row.sampled is not None), output_from))

    def close(self) -> None:
        self.runner.close()


def _over_the_wire(message: Any) -> Any:
    return decode(encode(message))
