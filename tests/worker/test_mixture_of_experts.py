"""Mixtures of experts, and a dense model with windows, through the C kernels: transformers' routing and logits, and the same
tokens whatever happens."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rig import TINY, TINY_SEED, Rig, RigModel, forward_of, load_path, one_step, tiny_model
from test_mxfp4 import published
from tiny_models import CASES, PROMPTS, oracle_logits, oracle_model

from baton.core.events import EvictSome, PreemptSome
from baton.models.config import Experts, LinearScaling, RopeConfig, Traits, YarnScaling
from baton.models.layers import experts as mixtures
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import StoredTensor
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import MXFP4
from baton.native import library
from baton.testing.platforms import all_traits
from dense_oracle import all_logits, load_model

__all__ = ["published"]  # a fixture
FAMILIES = [case for case in CASES if "moe" in case or case in ("mixtral", "gpt-oss")]
CONFIG = replace(
    TINY,
    head_dim=8,
    experts=Experts(
        count=6, per_token=3, inner_size=32, normalised=True, correction=True, shared_size=32, shared_gate=True,
        layers=(False, True),
    ),
)  # fmt: skip
OSS = replace(
    TINY,
    experts=Experts(count=6, per_token=3, inner_size=64, normalised=True, bias=True),
    traits=Traits(qkv_bias=True, output_bias=True, sinks=True, activation="swiglu_oai", layer_windows=(6, None)),
    rope=RopeConfig(theta=150_000.0, scaling=YarnScaling(factor=4.0, original_context=16, truncate=False)),
)
NEAR = RopeConfig(theta=500.0)
WINDOWED = replace(
    TINY,
    layers=3,
    traits=Traits(
        qk_norm=True, norms="both", activation="gelu_tanh", embedding_scale=5.0, attention_scale=0.3,
        layer_windows=(5, None, 5), layer_ropes=(NEAR, RopeConfig(scaling=LinearScaling(factor=3.0)), NEAR),
    ),
)  # fmt: skip
"""A dense model in the shape of Gemma 3."""
DENSE = {
    "windowed": WINDOWED,
    **{kind: all_traits(replace(TINY, layers=3, head_dim=16), kind) for kind in ("dense", "parallel", "after")},
}
QUANTIZATIONS = pytest.mark.parametrize("quantization", ["none", "int8", "int4", "mxfp4"])
"""The last one: gpt-oss, with experts in the 4 bits of its files."""
AND_WINDOWED = pytest.mark.parametrize(
    "quantization",
    [
        *("none", "int8", "int4", "mxfp4", "windowed", "windowed int8", "dense", "parallel", "after"),
        *(pytest.param(f"{kind} int8", marks=pytest.mark.slow) for kind in ("dense", "parallel", "after")),
    ],
)
"""Also dense models with all traits at once: LayerNorm, norms after, parallel, partial or no rotation, norms across heads."""
ANSWERS = {"max_tokens": 10, "logprobs": 2}
SHARED = [30, 2, 7, 7] * 5
REQUESTS = {"a": [5, 3, 60, 60, 1, 2, 9], "b": [11], "c": [*SHARED, 4], "d": [*SHARED, 9, 9], "e": [1, 2, 3] * 6}

Picks = tuple[torch.Tensor, torch.Tensor]
"""Of the rows of a layer: experts by their number, and shares in that order."""


class Mxfp4Experts(DummyWeights):
    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: replace(tensor, type=MXFP4, nbytes=self.raw(name).data.nbytes) if _is_expert(name) else tensor
            for name, tensor in super().stored().items()
        }

    def raw(self, name: str) -> RawTensor:
        if not _is_expert(name):
            return super().raw(name)
        rows, width = self._shapes[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        blocks = rng.integers(0, 256, (rows, width // 32, MXFP4.block_bytes), np.uint8)
        blocks[:, :, 0] = 121 + blocks[:, :, 0] % 4
        return RawTensor(MXFP4, (rows, width), blocks.reshape(rows, -1))


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name and name.endswith(".weight")


def by_expert(picked: torch.Tensor, shares: torch.Tensor) -> Picks:
    order = picked.argsort(-1)
    return picked.gather(-1, order), shares.float().gather(-1, order)


def their_routing(oracle: Any, prompt: list[int]) -> list[Picks]:
    found: list[Picks] = []
    modules = [module for module in oracle.modules() if type(module).__name__.endswith("Experts")]
    hooks = [module.register_forward_pre_hook(lambda _, given: found.append(by_expert(*given[1:3]))) for module in modules]
    oracle_logits(oracle, prompt)
    for hook in hooks:
        hook.remove()
    return found


def our_routing(model: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Picks]:
    found: list[Picks] = []
    pick = mixtures.pick_experts

    def recorded(*given: Any) -> Picks:
        picks = pick(*given)
        found.append(by_expert(*picks))
        return picks

    monkeypatch.setattr(mixtures, "pick_experts", recorded)
    all_logits(model, prompt)
    return found


@pytest.mark.parametrize("case", FAMILIES)
def test_routing_and_then_logits_are_those_of_transformers(case, tmp_path, monkeypatch):
    oracle, prompt = oracle_model(case), PROMPTS[3]
    oracle.save_pretrained(tmp_path)
    theirs, ours = their_routing(oracle, prompt), our_routing(load_model(tmp_path).model, prompt, monkeypatch)
    assert len(theirs) == len(ours) > 0
    for their, our in zip(theirs, ours, strict=True):
        assert torch.equal(their[0], our[0])
        torch.testing.assert_close(their[1], our[1], atol=1e-5, rtol=0)
    forward = forward_of(load_path(tmp_path, compute="native"))
    logits = forward.logits(forward.hidden(one_step([prompt])))
    np.testing.assert_allclose(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
    forward.close()


def test_gpt_oss_as_it_is_published_keeps_its_experts_in_4_bits(published):
    """Blocks and scales in safetensors. Weights are exact; what is rounded are activations, and other matrices to 8 bits."""
    folder, oracle = published
    exact, kept = (forward_of(load_path(folder, compute="native", quantization=way)) for way in ("none", "auto"))
    step, expected = one_step([PROMPTS[3]]), oracle_logits(oracle, PROMPTS[3]).numpy()
    np.testing.assert_allclose(exact.logits(exact.hidden(step)), expected, atol=1e-4, rtol=0)
    mixture = kept._decoder._model.blocks[1].mixture  # type: ignore[attr-defined]
    assert {mixture.gate_up[e].kind for e in range(5)} | {mixture.down[e].kind for e in range(5)} == {library.MXFP4}
    near = kept.logits(kept.hidden(step))
    assert np.abs(near - expected).mean() < 0.05 * np.abs(expected).mean()
    exact.close()
    kept.close()


def answers(rig: Rig) -> dict[tuple[str, int], list]:
    """Tokens, and what the model thought of them to the last bit."""
    assert rig.runner.executor.name.startswith("native")
    return {key: [row.sampled for row in rows if row.sampled is not None] for key, rows in rig.logprobs.items()}


def model_of(quantization: str, compute: str = "native", *, exact: bool = False) -> RigModel:
    kind, _, rounded = quantization.partition(" ")
    if kind in DENSE:
        return tiny_model(DENSE[kind], compute=compute, quantization=rounded or "none")
    if quantization == "mxfp4":
        return tiny_model(OSS, Mxfp4Experts(OSS, TINY_SEED), compute=compute, quantization="none" if exact else "auto")
    return tiny_model(CONFIG, compute=compute, quantization="none" if exact else quantization)


def alone(model: RigModel) -> dict[tuple[str, int], list]:
    found: dict[tuple[str, int], list] = {}
    for name, prompt in REQUESTS.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, **ANSWERS)
        rig.run()
        found |= answers(rig)
    return found


@AND_WINDOWED
def test_chunks_a_tiny_pool_and_a_lost_worker_change_no_bit(quantization):
    model = model_of(quantization)
    expected = alone(model)
    for chunk in (1, 5, None):
        rig = Rig(model, blocks=14, chunk=chunk)
        for name, prompt in REQUESTS.items():
            rig.submit(name, prompt, **ANSWERS)

        def disturb(number: int, rig: Rig = rig) -> None:
            if number % 7 == 3 and number < 60:
                rig.dispatch(PreemptSome(1))
                rig.dispatch(EvictSome(2))
            if number == 12:
                rig.kill_worker()

        rig.run(disturb)
        assert answers(rig) == expected
        assert rig.instance.stats.preemptions > 0


@AND_WINDOWED
def test_a_cached_prefix_changes_no_bit(quantization):
    model = model_of(quantization)
    expected, rig = alone(model), Rig(model)
    for name, prompt in REQUESTS.items():
        rig.submit(name, prompt, **ANSWERS)
        rig.run()
    assert answers(rig) == expected
    assert rig.ended["d", 0].cached_tokens == len(SHARED)


@AND_WINDOWED
def test_another_instance_goes_on_with_what_was_handed_over(quantization):
    """Keys and values of a prompt, copied from the pool of the instance that computed it."""
    model, prompt = model_of(quantization), REQUESTS["e"]
    source, home = forward_of(model), forward_of(model)
    whole = source.logits(source.hidden(one_step([prompt])))[-1].copy()
    source.hidden(one_step([prompt[:-1]]))
    home._pool.data[:] = source._pool.data  # type: ignore[attr-defined]
    last = one_step([prompt])
    last.spans.starts[1], last.spans.contexts[0] = 1, len(prompt) - 1
    step = replace(last, token_ids=last.token_ids[-1:], positions=last.positions[-1:])
    assert np.array_equal(home.logits(home.hidden(step))[0], whole)
    source.close()
    home.close()


@QUANTIZATIONS
def test_a_mixture_loses_no_more_by_rounding_than_torch_does(quantization):
    """torch rounds weights and activations as kernels of blocks do; picks may differ where two experts are nearly alike."""
    models = model_of(quantization, "torch", exact=True), model_of(quantization), model_of(quantization, "torch")
    exact, ours, theirs = map(forward_of, models)
    step = one_step([REQUESTS["e"], REQUESTS["c"]])
    expected, found, other = (forward.hidden(step) for forward in (exact, ours, theirs))
    far, most = (np.median(np.abs(hidden - expected).max(-1)) for hidden in (found, other))
    assert far < (1e-5 if quantization == "none" else 1.5 * most)
