"""The platform under test: a small random model on it, beside the same model on the oracle, which is plain torch on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from baton.config import WorkerConfig
from baton.grammar.vocabulary import Vocabulary
from baton.models.config import (
    NO_ROPE,
    Experts,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    Traits,
    YarnScaling,
)
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import WeightSource
from baton.models.open import OpenedModel
from baton.models.raw_tensor import RawTensor
from baton.protocol.output import Ended
from baton.protocol.step import TokenLogprob
from baton.testing.step_rig import RigModel, StepRig
from baton.worker.platforms.base import Platform
from baton.worker.platforms.choose import choose

Prompts = dict[str, list[int]]
"""Token ids by name of the request."""
Disturb = Callable[[StepRig, int], None]
"""Callback with the number of each step before the step."""
Load = Callable[[ModelConfig, WeightSource], RigModel]

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
SEED = 3
"""Seed of the weights, chosen so that answers vary and few tokens repeat."""
POISON = 50
"""Id of a token whose embedding is NaN, in a poisoned model."""


SCALINGS: dict[str, RopeScaling] = {
    "dense": Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32),
    "parallel": LinearScaling(factor=3.0),
    "after": FrequencyDivisors(divisors=(1.0, 1.5, 2.0, 4.0), attention_factor=1.1),
    "experts": YarnScaling(factor=4.0, original_context=16, attention_factor=1.2),
    "experts and sinks": YarnScaling(factor=4.0, original_context=16, truncate=False),
}
"""The kinds of models that all_traits makes, each with a scaling of its rotary positions."""


def all_traits(config: ModelConfig, kind: str) -> ModelConfig:
    """Sizes with all traits at once: of `dense` models, of those with `experts`, or also those of gpt-oss. Two kinds
    have what excludes norms in `both` places: `parallel` attention and MLP, and norms `after` them only. Together the kinds set
    every trait (tests/testing/test_all_traits.py)."""
    layers = range(config.layers)
    ropes = (RopeConfig(theta=500.0, dimensions=8, scaling=SCALINGS[kind]), NO_ROPE)
    traits = Traits(
        qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, qk_norm_across_heads=True, norms="both", layer_norm=True,
        norm_bias=True, activation="gelu_tanh", embedding_scale=3.0, attention_scale=0.2, logits_scale=0.5,
        layer_windows=tuple(None if layer % 2 else 7 for layer in layers),
        layer_ropes=tuple(ropes[layer % 2] for layer in layers),
    )  # fmt: skip
    if kind == "dense":
        return replace(config, traits=traits)
    if kind == "parallel":
        return replace(config, traits=replace(traits, parallel=True, norms="before"))
    if kind == "after":
        return replace(config, traits=replace(traits, norms="after"))
    mixture = Experts(
        count=6, per_token=2, inner_size=32, normalised=True, layers=tuple(layer > 0 for layer in layers), scoring="sigmoid",
        correction=True, scale=1.5, shared_size=24, shared_gate=True,
    )  # fmt: skip
    if kind == "experts":
        return replace(config, traits=traits, experts=mixture)
    oss = replace(mixture, bias=True, scoring="softmax", normalised=False)
    return replace(config, traits=replace(traits, sinks=True, activation="swiglu_oai"), experts=oss)


class PoisonedWeights(DummyWeights):
    def raw(self, name: str) -> RawTensor:
        tensor = super().raw(name)
        if name == "embed.weight":
            tensor.data.view(np.float32)[POISON] = np.nan
        return tensor


@dataclass
class Results:
    """Results by name of the request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, dict[int, TokenLogprob]] = field(default_factory=dict)
    vectors: dict[str, bytes] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class PlatformUnderTest:
    name: str
    load: Load
    config: ModelConfig = TINY
    same_bits: bool = False
    "Whether the platform promises the same bits in any batch and in any chunks."
    hardware: Platform | None = None
    "The platform. None: only an executor is tested."
    settings: WorkerConfig | None = None
    "The settings that the platform's opener returned."
    slots: int = 8
    prompt_tokens_max: int = 60
    output_tokens: int = 16
    slow: bool = False
    "Whether an interpreter computes, so that some cases use fewer requests."

    @property
    def rig(self) -> dict[str, Any]:
        return {"slots": self.slots, "blocks": 64, "block_size": 16, "tokens_per_step": 64}

    def prompts(self, count: int, seed: int, shared: int = 0) -> Prompts:
        """Random prompts. `shared`: per cent of the longest prompt that all prompts begin with."""
        rng, most = random.Random(seed), self.prompt_tokens_max
        start = [rng.randrange(END) for _ in range(shared * most // 100)]
        count = min(count, self.slots)
        return {
            f"p{n}": start + [rng.randrange(POISON) for _ in range(rng.randint(1, most - len(start)))] for n in range(count)
        }

    def run(
        self, requests: Prompts, rig: dict[str, Any] | None = None, disturb: Disturb | None = None, **sampling: Any
    ) -> Results:
        """Runs all requests at once. `sampling`: for all; under `each`: {name: settings} for single ones."""
        return self._run(self.model(), requests, {**self.rig, **(rig or {})}, disturb, **sampling)

    def oracle(self, requests: Prompts, **sampling: Any) -> Results:
        """Runs each request alone, one step at a time, in torch."""
        each, found = sampling.pop("each", {}), Results()
        for name, prompt in requests.items():
            one = self._run(
                oracle_model(self.config), {name: prompt}, {**self.rig, "steps_in_flight": 1}, **sampling | each.get(name, {})
            )
            for part in ("tokens", "logprobs", "vectors", "ended"):
                getattr(found, part).update(getattr(one, part))
        return found

    def poisoned(self) -> PlatformUnderTest:
        """The platform with a model that gives NaN for POISON."""
        return replace(self, load=lambda config, weights: self.load(config, PoisonedWeights(config, SEED)))

    def model(self) -> RigModel:
        return _loaded(self.load, self.config)

    def _run(
        self, model: RigModel, requests: Prompts, rig: dict[str, Any], disturb: Disturb | None = None, **sampling: Any
    ) -> Results:
        one, each = StepRig(model, **rig), sampling.pop("each", {})
        for name, prompt in requests.items():
            one.submit(name, prompt, **{"max_tokens": self.output_tokens, **sampling, **each.get(name, {})})
        one.run(None if disturb is None else lambda number: disturb(one, number))
        vectors = {name: {row.embedding for row in one.logprobs[name, 0] if row.embedding} for name in requests}
        assert all(len(found) <= 1 for found in vectors.values()), "two vectors of one prompt differ"
        results = Results(
            {name: one.tokens.get((name, 0), []) for name in requests},
            {name: one.token_logprobs(name) for name in requests},
            {name: found.pop() for name, found in vectors.items() if found},
            {name: one.ended[name, 0] for name in requests},
            one.instance.stats.preemptions,
        )
        one.close()
        return results


@cache
def _loaded(load: Load, config: ModelConfig) -> RigModel:
    return load(config, DummyWeights(config, SEED))


def with_vocabulary(model: RigModel) -> RigModel:
    """The model with a vocabulary, for requests with a grammar."""
    vocabulary = Vocabulary(TOKENS, [END], len(TOKENS))
    return replace(model, vocabulary=lambda: vocabulary)


def on_device(
    device: str, *, config: ModelConfig = TINY, name: str = "", same_bits: bool = False, **settings: Any
) -> PlatformUnderTest:
    """The platform of `--device`, in float32 and with exact weights. `settings`: more fields of WorkerConfig."""
    asked: dict[str, Any] = {"dtype": "float32", "quantization": "none", "threads": 1, "slots": 8, "tokens_per_step": 64}
    hardware, resolved = choose(WorkerConfig(device=device, block_size=16, **{**asked, **settings}), Path())

    def load(config: ModelConfig, weights: WeightSource) -> RigModel:
        loaded = hardware.load(OpenedModel(Path(), config, weights), resolved, None)
        return with_vocabulary(RigModel(config, loaded, hardware))

    sizes: dict[str, Any] = {"prompt_tokens_max": 90, "output_tokens": 24} if config is SMALL else {}
    return PlatformUnderTest(
        name=name or device, load=load, config=config, same_bits=same_bits, hardware=hardware, settings=resolved, **sizes
    )


@cache
def oracle_model(config: ModelConfig) -> RigModel:
    return _loaded(on_device("cpu", compute="torch").load, config)
