"""What the suite runs on: the same random model on each platform, beside the oracle, which is plain torch on the CPU.

native               our CPU kernels                          cuda                 our GPU kernels
torch                the oracle itself: must agree with       cuda-torch           plain torch on the GPU
                     itself through chunks and preemptions    cuda-deterministic   the GPU kernels with --deterministic
interpreted          the GPU kernels in Triton's interpreter
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import Rig, RigModel, load

from baton.config import WorkerConfig
from baton.grammar.vocabulary import Vocabulary
from baton.kvpool.layout import KVKind
from baton.models.config import ModelConfig, RopeConfig, Traits
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import RawWeights
from baton.models.open import OpenedModel
from baton.models.raw_tensor import RawTensor
from baton.protocol.output import Ended
from baton.protocol.step import TokenLogprob
from baton.worker.executors.base import LoadedExecutor

Requests = dict[str, list[int]]
"""Prompts by name."""
END = 96
TOKENS = [*(bytes([byte]) for byte in range(32, 127)), b"\n", b"<end>"]
TINY = ModelConfig(
    architecture="qwen3", vocab_size=len(TOKENS), layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=16,
    intermediate_size=48, rope=RopeConfig(theta=10000.0), norm_eps=1e-5, tied_embeddings=False, context_tokens_max=96,
    traits=Traits(qk_norm=True),
)  # fmt: skip
SMALL = replace(
    TINY, layers=3, hidden_size=256, heads=8, kv_heads=2, head_dim=64, intermediate_size=384, context_tokens_max=512
)
POISON = 50
"""A token whose embedding is not a number, in a model with `poisoned`."""


class Poisoned(DummyWeights):
    def raw(self, name: str) -> RawTensor:
        tensor = super().raw(name)
        if name == "embed.weight":
            tensor.data.view(np.float32)[POISON] = np.nan
        return tensor


@dataclass
class Told:
    """What came of some requests."""

    tokens: dict[str, list[int]]
    words: dict[str, dict[int, TokenLogprob]]
    vectors: dict[str, bytes]
    ended: dict[str, Ended]
    preemptions: int


@dataclass
class Platform:
    name: str
    config: ModelConfig
    same_bits: bool
    "Promises the same bits in any company and in any chunks."
    rig: dict[str, Any]
    tokens_max: int
    "Of a prompt. The interpreter takes a second for a few tokens."
    output: int
    model: RigModel

    def prompts(self, count: int, seed: int, shared: int = 0) -> Requests:
        rng, most = random.Random(seed), self.tokens_max
        start = [rng.randrange(END) for _ in range(shared * most // 100)]
        count = min(count, self.rig["slots"])
        return {
            f"p{n}": start + [rng.randrange(POISON) for _ in range(rng.randint(1, most - len(start)))] for n in range(count)
        }

    def run(
        self, requests: dict[str, list[int]], rig: dict[str, Any] | None = None, disturb: Any = None, **sampling: Any
    ) -> Told:
        """sampling: of all; {name: settings} under `each` beside it."""
        return run(self.model, requests, {**self.rig, **(rig or {})}, disturb, **{"max_tokens": self.output, **sampling})

    def oracle(self, requests: Requests, **sampling: Any) -> Told:
        """Each alone, one step at a time."""
        model, each = _oracle(self.config), sampling.pop("each", {})
        rig, found = {**self.rig, "steps_in_flight": 1}, Told({}, {}, {}, {}, 0)
        for name, prompt in requests.items():
            one = run(model, {name: prompt}, rig, **{"max_tokens": self.output, **sampling, **each.get(name, {})})
            for field in ("tokens", "words", "vectors", "ended"):
                getattr(found, field).update(getattr(one, field))
        return found

    def poisoned(self) -> Platform:
        return replace(self, model=_MAKE[self.name.partition("-")[0]](self.name, self.config, Poisoned))


def run(model: RigModel, requests: Requests, rig: dict[str, Any], disturb: Any = None, **sampling: Any) -> Told:
    one, each = Rig(model, **rig), sampling.pop("each", {})
    for name, prompt in requests.items():
        one.submit(name, prompt, **{**sampling, **each.get(name, {})})
    one.run(None if disturb is None else lambda number: disturb(one, number))
    vectors = {name: {row.embedding for row in one.logprobs[name, 0] if row.embedding} for name in requests}
    assert all(len(told) <= 1 for told in vectors.values()), "told twice, and not the same"
    told = Told(
        {name: one.tokens.get((name, 0), []) for name in requests},
        {name: one.words(name) for name in requests},
        {name: told.pop() for name, told in vectors.items() if told},
        {name: one.ended[name, 0] for name in requests},
        one.instance.stats.preemptions,
    )
    one.close()
    return told


# The platforms


def open_platform(name: str) -> Platform:
    kind = name.partition("-")[0]
    config = SMALL if kind == "cuda" else TINY
    rig = {"slots": 4 if kind == "interpreted" else 8, "blocks": 64, "block_size": 16, "tokens_per_step": 64}
    tokens, output = {"interpreted": (20, 5), "cuda": (90, 24)}.get(kind, (60, 16))
    model = _MAKE[kind](name, config, DummyWeights)
    return Platform(name, config, name in ("native", "cuda-deterministic"), rig, tokens, output, model)


def _with_vocabulary(model: RigModel) -> RigModel:
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    return replace(model, vocabulary=lambda: vocabulary)


def _on_cpu(name: str, config: ModelConfig, weights: type[DummyWeights]) -> RigModel:
    compute: Any = name
    return _with_vocabulary(load(OpenedModel(Path(), config, weights(config, 3)), compute=compute))


_ORACLES: dict[int, RigModel] = {}


def _oracle(config: ModelConfig) -> RigModel:
    if config.hidden_size not in _ORACLES:
        _ORACLES[config.hidden_size] = _on_cpu("torch", config, DummyWeights)
    return _ORACLES[config.hidden_size]


def _on_gpu(name: str, config: ModelConfig, weights: type[DummyWeights]) -> RigModel:
    import torch

    if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
        pytest.skip("no GPU here")
    from baton.worker.platforms.cuda import CudaPlatform

    platform, kind = CudaPlatform(), name.partition("-")[2]
    settings = WorkerConfig(
        dtype="float32", quantization="none", slots=8, tokens_per_step=64, block_size=16, device="cuda",
        compute="torch" if kind == "torch" else "auto", deterministic=kind == "deterministic",
    )  # fmt: skip
    loaded = platform.load(OpenedModel(Path(), config, weights(config, 3)), settings)
    return _with_vocabulary(RigModel(config, loaded, platform))


def _interpreted(name: str, config: ModelConfig, weights: type[DummyWeights]) -> RigModel:
    """Its pool is a tensor; the rig's own is only counted."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    if Path("/dev/nvidia0").exists():
        pytest.skip("Triton's interpreter and compiler do not share a process; the GPU's tests run here")
    import torch
    from interpreted_steps import InterpretedSteps
    from mended_interpreter import mend_interpreter

    from baton.models.torch_weights import Weights
    from baton.worker.cuda.decoder_step import DecoderStep
    from baton.worker.cuda.executor import CudaExecutor
    from baton.worker.cuda.layer_steps import StepLimits
    from baton.worker.cuda.weights import take_weights

    mend_interpreter()
    taken = take_weights(config, Weights(RawWeights(weights(config, 3), config)).take)

    def with_pool(pool: Any) -> CudaExecutor:
        layout = pool.layout
        shape = (pool.blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        limits = StepLimits(rows=64, sequences=4, context_tokens=config.context_tokens_max)
        return CudaExecutor(
            InterpretedSteps(DecoderStep(config, taken, torch.full(shape, float("nan")), limits)), "interpreter"
        )

    return _with_vocabulary(RigModel(config, LoadedExecutor(KVKind("float32"), with_pool)))


_MAKE = {"native": _on_cpu, "torch": _on_cpu, "interpreted": _interpreted, "cuda": _on_gpu}
