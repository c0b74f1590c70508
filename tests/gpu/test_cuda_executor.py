"""The executor on the GPU, as far as it differs from others: bfloat16, bits in deterministic mode, 8 bits, steps ahead.

What all that compute have in common is in tests/testing, which runs on the GPU too.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "worker"))

torch = pytest.importorskip("torch")
if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
    pytest.skip("no GPU here", allow_module_level=True)

from rig import Rig, RigModel, make_pool, make_runner  # noqa: E402
from test_model_runner import new, plan  # noqa: E402

from baton.config import WorkerConfig  # noqa: E402
from baton.models.config import ModelConfig, RopeConfig, Traits  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.models.open import OpenedModel  # noqa: E402
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


def load(where: str, config: ModelConfig, compute: str = "auto", opened: OpenedModel | None = None, **more: Any) -> RigModel:
    opened = opened or OpenedModel(Path(), config, DummyWeights(config, 3))
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_vectors_are_the_same_in_any_chunks(dtype):
    model, requests = load("cuda", SMALL, deterministic=True, dtype=dtype), prompts(6, seed=10)

    def vectors(chunk: int | None) -> list[bytes]:
        rig = Rig(model, block_size=16, blocks=128, chunk=chunk)
        for name, prompt in requests.items():
            rig.submit(name, prompt, max_tokens=1, pooling="mean")
        rig.run()
        found = [row.embedding for name in requests for row in rig.logprobs[name, 0] if row.embedding]
        rig.close()
        return found

    together = vectors(None)
    assert len(together) == 6
    assert vectors(7) == together


def test_label_logits_are_those_of_plain_torch():
    requests = prompts(4, seed=11)

    def logits(backend: str) -> list[np.ndarray]:
        rig = Rig(load(backend, SMALL, dtype="float32"), block_size=16, blocks=128)
        for name, prompt in requests.items():
            rig.submit(name, prompt, max_tokens=1, pooling="last", label_ids=(3, 17))
        rig.run()
        found = [np.frombuffer(row.embedding, "<f4") for name in requests for row in rig.logprobs[name, 0] if row.embedding]
        rig.close()
        return found

    ours, plain = logits("cuda"), logits("torch")
    assert len(ours) == 4
    np.testing.assert_allclose(np.stack(ours), np.stack(plain), atol=2e-3)


@pytest.mark.parametrize("wrong", [500, 1003, 70_000, 2**31 - 1])
def test_an_id_outside_the_vocabulary_harms_no_neighbour(wrong):
    """Found by a review: it was counted in the row of another slot, or past the end, which ended the worker."""
    model, good = load("cuda", SMALL, deterministic=True), prompts(3, seed=4)
    sampling = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "max_tokens": 12}
    expected = answers(model, good, **sampling)[0]
    rig = Rig(model, block_size=16, blocks=128)
    for name, prompt in {"bad": [5, wrong], **good}.items():
        rig.submit(name, prompt, **sampling)
    rig.run()
    assert {key: rig.tokens[key] for key in expected} == expected
    assert rig.ended["bad", 0].reason is FinishReason.ERROR
    rig.close()
