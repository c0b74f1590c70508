"""Mixtures of experts through the C kernels: transformers' routing and logits, and the same tokens whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rig import TINY, Rig, RigModel, forward_of, load_path, one_step, tiny_model
from tiny_models import CASES, PROMPTS, oracle_logits, oracle_model

from baton.core.events import EvictSome, PreemptSome
from baton.models.config import Experts
from baton.models.layers import experts as mixtures
from baton.models.load import load_model
from baton.models.reference import all_logits

FAMILIES = [case for case in CASES if "moe" in case or case == "mixtral"]
CONFIG = replace(
    TINY,
    head_dim=8,
    experts=Experts(
        count=6, per_token=3, inner_size=32, normalised=True, correction=True, shared_size=32, shared_gate=True,
        layers=(False, True),
    ),
)  # fmt: skip
QUANTIZATIONS = pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
ANSWERS = {"max_tokens": 10, "logprobs": 2}
SHARED = [30, 2, 7, 7] * 5
REQUESTS = {"a": [5, 3, 60, 60, 1, 2, 9], "b": [11], "c": [*SHARED, 4], "d": [*SHARED, 9, 9], "e": [1, 2, 3] * 6}

Picks = tuple[torch.Tensor, torch.Tensor]
"""Of the rows of a layer: experts by their number, and shares in that order."""


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


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "ernie-moe", "qwen2-moe-all"])
def test_so_are_those_of_a_gguf_file(case, tmp_path, monkeypatch):
    families = pytest.importorskip("test_gguf_families")
    monkeypatch.setitem(CASES, "qwen2-moe-all", ("Qwen2Moe", {**CASES["qwen2-moe"][1], "mlp_only_layers": []}))
    oracle, prompt = oracle_model(case), PROMPTS[3]
    path = families.write(tmp_path / "m.gguf", oracle, *families.FAMILIES[case])
    forward = forward_of(load_path(path, compute="native"))
    logits = forward.logits(forward.hidden(one_step([prompt])))
    np.testing.assert_allclose(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
    forward.close()


def answers(rig: Rig) -> dict[tuple[str, int], list]:
    """Tokens, and what the model thought of them to the last bit."""
    assert rig.runner.executor.name.startswith("native")
    return {key: [row.sampled for row in rows if row.sampled is not None] for key, rows in rig.logprobs.items()}


def model_of(quantization: str) -> RigModel:
    return tiny_model(CONFIG, compute="native", quantization=quantization)


def alone(model: RigModel) -> dict[tuple[str, int], list]:
    found: dict[tuple[str, int], list] = {}
    for name, prompt in REQUESTS.items():
        rig = Rig(model, steps_in_flight=1)
        rig.submit(name, prompt, **ANSWERS)
        rig.run()
        found |= answers(rig)
    return found


@QUANTIZATIONS
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


@QUANTIZATIONS
def test_a_cached_prefix_changes_no_bit(quantization):
    model = model_of(quantization)
    expected, rig = alone(model), Rig(model)
    for name, prompt in REQUESTS.items():
        rig.submit(name, prompt, **ANSWERS)
        rig.run()
    assert answers(rig) == expected
    assert rig.ended["d", 0].cached_tokens == len(SHARED)


@QUANTIZATIONS
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
    exact, ours, theirs = (
        forward_of(tiny_model(CONFIG, compute=compute, quantization=kind))
        for compute, kind in (("torch", "none"), ("native", quantization), ("torch", quantization))
    )
    step = one_step([REQUESTS["e"], REQUESTS["c"]])
    expected, found, other = (forward.hidden(step) for forward in (exact, ours, theirs))
    far, most = (np.median(np.abs(hidden - expected).max(-1)) for hidden in (found, other))
    assert far < (1e-5 if quantization == "none" else 1.5 * most)
