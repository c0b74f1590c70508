"""The real core and the real runner in one process: requests in, tokens out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.config import InstanceConfig, KVConfig, SchedulerConfig
from baton.core.effects import Refuse, RestartWorker, RunStep
from baton.core.engine.instance import Instance
from baton.core.events import Event, StepDone, Submit, WorkerReady
from baton.models.config import ModelConfig, RopeConfig
from baton.models.load import LoadedModel, dummy_model
from baton.models.tokenizer_source import TokenizerSource
from baton.protocol.codec import decode, encode
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.step import RowLogprobs, StepPlan, StepResult
from baton.worker.attention.choose import attention_for
from baton.worker.forward.torch_forward import TorchForward
from baton.worker.kv_pool import KVLayout, KVPool
from baton.worker.model_runner import ModelRunner

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


def tiny_model(config: ModelConfig = TINY, seed: int = 3) -> LoadedModel:
    """This seed gives lively answers: few tokens come twice in a row."""
    return LoadedModel(Path(), config, dummy_model(config, seed=seed), TokenizerSource(None, None))


def make_pool(model: LoadedModel, *, blocks: int, block_size: int) -> KVPool:
    dtype = str(model.model.dtype).removeprefix("torch.")
    return KVPool.create(KVLayout.of(model.config, block_size, dtype), blocks)


def make_runner(model: LoadedModel, pool: KVPool, *, slots: int, native: bool = True) -> ModelRunner:
    return ModelRunner(TorchForward(model.model, attention_for(model.config, pool, native=native)), pool, slots=slots)


class Rig:
    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: int = 8,
        blocks: int = 256,
        block_size: int = 4,
        chunk: int | None = None,
        tokens_per_step: int = 4096,
        steps_in_flight: int = 2,
        native: bool = True,
    ) -> None:
        scheduler = SchedulerConfig(
            slots=slots, chunk_tokens_max=chunk, tokens_per_step=tokens_per_step, steps_in_flight=steps_in_flight
        )
        self.instance = Instance(InstanceConfig(kv=KVConfig(blocks=blocks, block_size=block_size), scheduler=scheduler))
        pool = make_pool(model, blocks=blocks, block_size=block_size)
        self.runner = make_runner(model, pool, slots=slots, native=native)
        self.plans: deque[StepPlan] = deque()
        self.history: list[tuple[StepPlan, StepResult]] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], Ended] = {}
        self.logprobs: dict[tuple[str, int], list[RowLogprobs]] = defaultdict(list)
        self.tell(WorkerReady(self.instance.worker.epoch))

    def tell(self, event: Event) -> None:
        for effect in self.instance.handle(event, Instant(0.0)):
            match effect:
                case RunStep(plan):
                    self.plans.append(decode(encode(plan)))
                case Emit(tokens, ended, logprobs):
                    for request, index, token in tokens:
                        self.tokens[request, index].append(token)
                    for request, index, row in logprobs:
                        self.logprobs[request, index].append(row)
                    self.ended.update({(end.request, end.index): end for end in ended})
                case Refuse() | RestartWorker():
                    raise AssertionError(effect)

    def submit(self, name: str, prompt: list[int], *, n: int = 1, priority: int = 0, **sampling: Any) -> None:
        params = SamplingParams(**sampling)
        self.tell(Submit(GenerateRequest(id=RequestId(name), prompt=tuple(prompt), sampling=params, n=n, priority=priority)))

    def step(self) -> bool:
        """Execute the oldest plan and take its result in. False: there is none."""
        if not self.plans:
            return False
        plan = self.plans.popleft()
        result = decode(encode(self.runner.execute(plan)))
        self.history.append((plan, result))
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
        assert not self.instance.groups
        return dict(self.tokens)


def generate(model: LoadedModel, prompts: dict[str, list[int]], *, rig: dict[str, Any] | None = None, **sampling: Any):
    """Tokens of these prompts, all submitted at once."""
    one = Rig(model, **(rig or {}))
    for name, prompt in prompts.items():
        one.submit(name, prompt, **sampling)
    return one.run()
