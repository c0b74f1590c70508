"""Drafts on the device change the number of steps and nothing else (tests/worker/test_speculation.py has the same for CPUs).

On a GPU with --deterministic, where a row's bits do not depend on the other rows of a step; elsewhere in Triton's interpreter,
where they do not either, with fewer requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for folder in ("worker", "conformance"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from rig import TINY, TINY_SEED, Rig, RigModel  # noqa: E402
from test_grammar_runs import END, GRAMMARS, TOKENS  # noqa: E402
from test_speculation import Recorded, Requests, requests, run, said  # noqa: E402

from baton.config import WorkerConfig  # noqa: E402
from baton.core.events import EvictSome, PreemptSome  # noqa: E402
from baton.grammar.vocabulary import Vocabulary  # noqa: E402
from baton.kvpool.layout import KVKind  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.models.loaders.weights import RawWeights  # noqa: E402
from baton.models.open import OpenedModel  # noqa: E402
from baton.worker.executors.base import LoadedExecutor  # noqa: E402

FEW = replace(TINY, layers=1, heads=2, kv_heads=1, head_dim=16, context_tokens_max=128)
"""Few programs per kernel: the interpreter runs them one by one."""
HAS_GPU = Path("/dev/nvidia0").exists() and torch.cuda.is_available()
DRAFTS = 24
"""Draft rows per step of the interpreted step."""


def interpreted(weights: DummyWeights | None = None) -> RigModel:
    from interpreted_steps import InterpretedSteps
    from mended_interpreter import mend_interpreter

    from baton.models.torch_weights import Weights
    from baton.worker.cuda.decoder_step import DecoderStep
    from baton.worker.cuda.draft_passes import CudaDraftPasses
    from baton.worker.cuda.executor import CudaExecutor
    from baton.worker.cuda.layer_steps import StepLimits
    from baton.worker.cuda.weights import take_weights

    mend_interpreter()
    taken = take_weights(FEW, Weights(RawWeights(weights or DummyWeights(FEW, TINY_SEED), FEW)).take)

    def steps(pool: Any, **more: Any) -> InterpretedSteps:
        layout = pool.layout
        shape = (pool.blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        limits = StepLimits(rows=128, sequences=4, context_tokens=FEW.context_tokens_max, **more)
        return InterpretedSteps(DecoderStep(FEW, taken, torch.full(shape, float("nan")), limits, deterministic=True))

    def with_pool(pool: Any, context_tokens: int | None = None, /) -> CudaExecutor:
        return CudaExecutor(steps(pool, drafts=DRAFTS), "interpreter")

    def drafting(pool: Any, context_tokens: int, /) -> CudaDraftPasses:
        return CudaDraftPasses(steps(pool, greedy=True))

    return RigModel(FEW, LoadedExecutor(KVKind("float32"), with_pool, drafting))


def on_gpu(dtype: str, weights: DummyWeights | None = None, **settings: Any) -> RigModel:
    from baton.worker.platforms.cuda import CudaPlatform

    sizes: dict[str, Any] = {"quantization": "none", "slots": 4, "tokens_per_step": 512, "block_size": 4, "device": "cuda"}
    platform, opened = CudaPlatform(), OpenedModel(Path(), TINY, weights or DummyWeights(TINY, TINY_SEED))
    config = WorkerConfig(**sizes, dtype=dtype, **{"deterministic": True, "speculate": "auto", **settings})
    return RigModel(TINY, platform.load(opened, config), platform)


@pytest.fixture(scope="module", params=["interpreted", "float32", "bfloat16"])
def model(request) -> RigModel:
    if (request.param == "interpreted") == HAS_GPU:
        pytest.skip("Triton's interpreter and compiler do not share a process" if HAS_GPU else "no GPU here")
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    made = interpreted() if request.param == "interpreted" else on_gpu(request.param)
    return replace(made, vocabulary=lambda: vocabulary)


def answers_of(asked: Requests, plain: Rig) -> list[list[int]]:
    return [asked[name][0] + tokens for (name, _), tokens in plain.tokens.items()]


def check(model: RigModel, asked: Requests, spoilt: float, most: int, **rig: Any) -> Recorded:
    plain = run(model, asked, slots=4)
    drafter = Recorded(answers_of(asked, plain), spoilt)
    one = run(model, asked, slots=4, drafter=lambda: drafter, drafts_max=most, **rig)
    assert said(one) == said(plain)
    assert drafter.drafted
    return drafter


def test_a_request_of_every_kind(model):
    kinds: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 1},
        "words": {"temperature": 1.0, "seed": 5, "bad_words": ((5, 6),), "min_tokens": 4, "stop_token_ids": tuple(range(60))},
    }
    asked = {name: ([5, 3, 60, 5, 3], {"max_tokens": 6, **sampling}) for name, sampling in kinds.items()}
    assert check(model, asked, 0.2, 2, steps_in_flight=2).accepted_count


def test_the_device_counts_what_the_host_counts(model):
    """Counts of tokens for penalties, before each step with drafts: accepted ones are among them, refused ones are not."""
    asked: Requests = {"p": ([5, 3, 60, 5, 3], {"max_tokens": 8, "frequency_penalty": 0.1})}
    drafter = Recorded(answers_of(asked, run(model, asked, slots=4)), 0.3, 1)
    compared = []

    def watch(rig: Rig) -> Callable[[int], None]:
        steps, counts = rig.runner.executor._steps, rig.runner.executor._step.columns.adjust.counts
        launch, state = steps.launch, lambda: rig.runner.sampling.states[0]

        def compare(batch: Any, **options: Any) -> Any:
            if batch.draft_counts is not None:
                with steps.queueing():
                    at = counts[0].cpu().numpy()
                tally = state().tally
                assert {token: int(at[token]) // 2 for token in at.nonzero()[0].tolist()} == dict(
                    zip(tally.ids.tolist(), tally.outputs.astype(int).tolist(), strict=True)
                )
                compared.append(tally.size)
            return launch(batch, **options)

        steps.launch = compare
        return lambda step: None

    run(model, asked, watch, slots=4, drafter=lambda: drafter, drafts_max=3)
    assert len(compared) > 1
    assert 0 < drafter.accepted_count < drafter.drafted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(125))
def test_a_thousand_drawn_requests(model, seed):
    if model.config is FEW and seed > 1:
        pytest.skip("for a GPU: the interpreter takes minutes")
    asked = requests(100 + seed, 2 if model.config is FEW else 8)
    spoilt = (0.0, 0.2, 0.5, 1.0)[seed % 4]
    check(model, asked, spoilt, 1 + seed % 8, steps_in_flight=1 + seed % 3, chunk=(None, 3)[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_preempted_evicted_and_killed(model, seed):
    asked = requests(50 + seed, 2 if model.config is FEW else 6)
    for _, sampling in asked.values():  # a prompt that is computed twice is delivered twice
        sampling.pop("prompt_logprobs", None)
    plain = run(model, asked, slots=4)
    drafter = Recorded(answers_of(asked, plain), 0.3, seed)

    def disturb(rig: Rig) -> Callable[[int], None]:
        def at(step: int) -> None:
            if step % 3 == 1:
                rig.dispatch((PreemptSome(1), PreemptSome(3), EvictSome(4))[step % 9 // 3])
            if step in (5, 11):
                rig.kill_worker()

        return at

    one = run(model, asked, disturb, slots=4, blocks=40, block_size=4, drafter=lambda: drafter, steps_in_flight=2)
    assert said(one) == said(plain)
    assert drafter.accepted_count


@pytest.mark.slow
@pytest.mark.parametrize("kind", GRAMMARS)
def test_structured_output(model, kind):
    """Masks behind drafts are those of the drafts before them, also with min_tokens."""
    sampling = {"max_tokens": 24, "grammar": GRAMMARS[kind], "stop_token_ids": (END,), "temperature": 0.8}
    asked = {f"p{i}": ([i + 1, 2 * i], {**sampling, "seed": i, "min_tokens": 4 * i}) for i in range(2)}
    check(model, asked, 0.1, 4)
