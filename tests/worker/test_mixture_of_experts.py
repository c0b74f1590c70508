"""A mixture of experts through the runner on a CPU: by torch, since our kernels there do not compute it."""

from dataclasses import replace
from pathlib import Path

import pytest
from rig import TINY, Rig, RigModel

from baton.config import WorkerConfig
from baton.errors import ModelUnsupported
from baton.models.config import Experts
from baton.models.load import dummy_model
from baton.models.loaders.dummy import DummyWeights
from baton.models.open import OpenedModel
from baton.models.reference import greedy_tokens
from baton.worker.platforms.cpu import CpuPlatform

CONFIG = replace(
    TINY, architecture="qwen3_moe", experts=Experts(count=6, per_token=2, inner_size=24, normalised=True), head_dim=8
)
PROMPTS = {"a": [5, 3, 60, 60, 1, 2, 9], "b": [11], "c": [30, 2, 7, 7] * 6}


def load(compute):
    settings = WorkerConfig(quantization="none", compute=compute, threads=1)
    return CpuPlatform().load(OpenedModel(Path(), CONFIG, DummyWeights(CONFIG, 3)), settings)


@pytest.mark.parametrize("chunk", [None, 5])
def test_tokens_are_those_of_the_model_alone(chunk):
    rig = Rig(RigModel(CONFIG, load("auto")), chunk=chunk)
    for name, prompt in PROMPTS.items():
        rig.submit(name, prompt, max_tokens=6)
    found = rig.run()
    model = dummy_model(CONFIG, seed=3)
    assert found == {(name, 0): greedy_tokens(model, prompt, 6) for name, prompt in PROMPTS.items()}


def test_native_kernels_say_that_they_do_not_compute_it():
    with pytest.raises(ModelUnsupported, match="do not compute mixtures of experts: take --compute torch"):
        load("native")


def test_the_pool_is_what_torch_wants():
    for compute in ("auto", "torch"):
        settings = WorkerConfig(quantization="int8", compute=compute, threads=1)
        assert CpuPlatform().kv_kind(CONFIG, settings).dtype == "float32"
