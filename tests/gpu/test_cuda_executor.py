"""The executor on the GPU against the torch executor on the CPU: the real core, the real runner, greedy tokens in float32.

Chunks, preemption, folded blocks and restarted workers must change nothing; nor may steps that are launched ahead.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "worker"))

torch = pytest.importorskip("torch")
if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
    pytest.skip("no GPU here", allow_module_level=True)

import numpy as np  # noqa: E402
from rig import Rig, RigModel, make_pool, make_runner  # noqa: E402
from test_model_runner import new, plan  # noqa: E402

from baton.config import WorkerConfig  # noqa: E402
from baton.models.config import ModelConfig, RopeConfig, Traits  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.models.open import OpenedModel  # noqa: E402
from baton.models.raw_tensor import RawTensor  # noqa: E402
from baton.protocol.request import FinishReason  # noqa: E402
from baton.worker.platforms.cpu import CpuPlatform  # noqa: E402
from baton.worker.platforms.cuda import CudaPlatform  # noqa: E402

SMALL = ModelConfig(
    architecture="llama",
    vocab_size=500,
    layers=3,
    hidden_size=256,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate_size=384,
    rope=RopeConfig(theta=10000.0),
    norm_eps=1e-5,
    tied_embeddings=False,
    context_tokens_max=512,
)
SHAPES = {"llama": SMALL, "qwen3": dataclasses.replace(SMALL, traits=Traits(qk_norm=True), tied_embeddings=True)}
SETTINGS: dict[str, Any] = {"dtype": "float32", "quantization": "none", "slots": 8, "tokens_per_step": 512, "block_size": 16}


class Poisoned(DummyWeights):
    """The embedding of token 50 is not-a-number."""

    def raw(self, name: str) -> RawTensor:
        tensor = super().raw(name)
        if name == "embed.weight":
            tensor.data.view(np.float32)[50] = np.nan
        return tensor


def load(
    where: str, config: ModelConfig, compute: str = "auto", weights: type[DummyWeights] = DummyWeights, **more: Any
) -> RigModel:
    opened = OpenedModel(Path(), config, weights(config, 3))
    if where == "cpu":
        settings = WorkerConfig(**SETTINGS, device="cpu", compute="torch", threads=8)
        return RigModel(config, CpuPlatform().load(opened, settings))
    platform = CudaPlatform()
    settings = WorkerConfig(**{**SETTINGS, **more}, device="cuda", compute=compute)
    return RigModel(config, platform.load(opened, settings), platform)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def cpu(shape):
    return load("cpu", shape)


@pytest.fixture(scope="module", params=["auto", "torch"])
def cuda(request, shape):
    return load("cuda", shape, request.param)


def prompts(count: int, seed: int = 0, shared: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    start = [rng.randrange(500) for _ in range(shared)]
    return {f"p{i}": start + [rng.randrange(500) for _ in range(rng.randint(1, 90))] for i in range(count)}


def answers(model: RigModel, requests: dict[str, list[int]], rig: dict[str, Any] | None = None, disturb=None, **sampling: Any):
    one = Rig(model, **{"block_size": 16, "blocks": 128, **(rig or {})})
    for name, prompt in requests.items():
        one.submit(name, prompt, **{"max_tokens": 24, **sampling})
    tokens = one.run(None if disturb is None else lambda number: disturb(one, number))
    preempted = sum(end.preemptions for end in one.ended.values())
    words = {name: one.words(name) for name in requests}
    one.close()
    return tokens, preempted, words


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_greedy_tokens_in_any_chunks(cpu, cuda, chunk):
    requests = prompts(12)
    expected, _, _ = answers(cpu, requests)
    found, _, _ = answers(cuda, requests, {"chunk": chunk})
    assert found == expected


def test_preempted_sequences_go_on_as_if_nothing_had_happened(cpu, cuda):
    requests = prompts(12, seed=1)
    expected, _, _ = answers(cpu, requests)
    found, preempted, _ = answers(cuda, requests, {"blocks": 20, "chunk": 32})
    assert preempted > 0
    assert found == expected


def test_shared_prompts_are_folded(cpu, cuda):
    requests = prompts(8, seed=2, shared=70)
    expected, _, _ = answers(cpu, requests)
    found, _, _ = answers(cuda, requests, {"chunk": 40})
    assert found == expected


def test_a_restarted_worker_goes_on(cpu, cuda):
    requests = prompts(6, seed=3)
    expected, _, _ = answers(cpu, requests)
    found, _, _ = answers(cuda, requests, disturb=lambda rig, number: rig.kill_worker() if number in (5, 17) else None)
    assert found == expected


def test_draws_are_those_of_the_cpu(cpu, cuda):
    """Logits differ by rounding, so a draw at an edge may differ; hundreds that do not are no chance."""
    requests = prompts(8, seed=4)
    for more in ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}):
        sampling = {"temperature": 0.8, **more}
        expected, _, _ = answers(cpu, requests, seed=11, **sampling)
        found, _, _ = answers(cuda, requests, seed=11, **sampling)
        equal = sum(found[key] == tokens for key, tokens in expected.items())
        assert equal >= len(expected) - 1, sampling


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": ((7, 5.0), (9, -5.0))},
        {"bad_words": tuple((token,) for token in range(100))},
        {"temperature": 0.7, "seed": 5, "min_tokens": 8, "stop_token_ids": (1, 2, 3)},
    ],
    ids=["penalties", "bias", "bad words", "min_tokens"],
)
def test_what_is_sampled_on_the_host(cpu, cuda, sampling):
    requests = prompts(6, seed=5)
    assert answers(cuda, requests, **sampling)[0] == answers(cpu, requests, **sampling)[0]


@pytest.mark.parametrize("chunk", [None, 5])
def test_log_probabilities(cpu, cuda, chunk):
    requests = prompts(4, seed=6)
    expected, found = (answers(model, requests, {"chunk": chunk}, logprobs=3, prompt_logprobs=2) for model in (cpu, cuda))
    assert found[0] == expected[0]
    for name in requests:
        assert sorted(found[2][name]) == sorted(expected[2][name])
        for position, word in expected[2][name].items():
            ours = found[2][name][position]
            assert (ours.token, ours.rank) == (word.token, word.rank)
            assert ours.logprob == pytest.approx(word.logprob, abs=1e-3)


def test_some_of_a_batch_are_sampled_on_the_host(cpu, cuda):
    def mixed(model: RigModel):
        rig = Rig(model, block_size=16, blocks=128)
        for place, (name, prompt) in enumerate(prompts(8, seed=7).items()):
            rig.submit(name, prompt, max_tokens=16, **({"presence_penalty": 0.5} if place % 3 == 0 else {}))
        tokens = rig.run()
        rig.close()
        return tokens

    assert mixed(cuda) == mixed(cpu)


@pytest.mark.parametrize("compute", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_not_a_number_ends_one_sequence_only(compute, chunk):
    requests = {"well": [1, 2, 3, 4, 5, 6], "sick": [1, 2, 3, 50, 4, 5, 6], "other": [9, 8, 7]}
    healthy = answers(load("cuda", SMALL, compute), {name: requests[name] for name in ("well", "other")})[0]
    rig = Rig(load("cuda", SMALL, compute, Poisoned), chunk=chunk, block_size=16, blocks=64)
    for name, prompt in requests.items():
        rig.submit(name, prompt, max_tokens=24)
    tokens = rig.run()
    assert rig.ended["sick", 0].reason is FinishReason.ERROR
    assert "NaN" in rig.ended["sick", 0].detail
    assert {key: tokens[key] for key in healthy} == healthy
    rig.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_answer_is_the_same_after_a_preemption(dtype):
    """What was decoded is computed again with the bits that it had."""
    model = load("cuda", SMALL, deterministic=True, dtype=dtype)
    requests = prompts(12, seed=1)
    expected, _, words = answers(model, requests, logprobs=1)
    found, preempted, words_again = answers(model, requests, {"blocks": 20, "chunk": 32}, logprobs=1)
    assert preempted > 0
    assert found == expected
    assert words_again == words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_answer_is_the_same_alone_and_together(dtype):
    """To the last bit of what the model thought of its tokens."""
    model = load("cuda", SMALL, deterministic=True, dtype=dtype)
    requests = prompts(8, seed=8)
    together = answers(model, requests, {"chunk": 33}, logprobs=1)
    for name, prompt in requests.items():
        alone = answers(model, {name: prompt}, logprobs=1)
        assert alone[0][name, 0] == together[0][name, 0]
        assert alone[2][name] == together[2][name]


@pytest.mark.parametrize(
    "more", [{"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"quantization": "fp8", "kv_dtype": "fp8"}], ids=str
)
def test_8_bits_change_little(cpu, shape, more):
    requests = prompts(4, seed=9)
    expected = answers(cpu, requests, prompt_logprobs=0, max_tokens=4)[2]
    found = answers(load("cuda", shape, **more), requests, {"chunk": 40}, prompt_logprobs=0, max_tokens=4)[2]
    off = [
        abs(found[name][position].logprob - expected[name][position].logprob)
        for name, prompt in requests.items()
        for position in range(1, len(prompt))
    ]
    assert 1e-4 < sum(off) / len(off) < 0.3


def test_steps_are_launched_ahead(cuda):
    runner = make_runner(cuda, make_pool(cuda, blocks=16, block_size=16), slots=8)
    if runner.steps_ahead == 1:
        pytest.skip("plain torch waits for each step")
    first = runner.submit(plan(1, new=(new(0, [1, 2, 3], blocks=(0,)),), run=[(0, 3)]))
    second = runner.submit(plan(2, run=[(0, 1)]))
    together = [runner.collect(ticket).values[0] for ticket in (first, second)]
    assert together == [
        runner.execute(plan(3 + step, **parts)).values[0]
        for step, parts in enumerate(
            (
                {"new": (new(1, [1, 2, 3], blocks=(3,)),), "run": [(1, 3)]},
                {"run": [(1, 1)]},
            )
        )
    ]
    runner.close()
