"""Tiny models for the rig of baton.testing, which runs the real core and the real runner in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from baton.config import Quantization, WorkerConfig
from baton.models.config import ModelConfig, RopeConfig
from baton.models.decoder import Decoder
from baton.models.load import build_model
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import WeightSource
from baton.models.open import OpenedModel, open_model
from baton.native.build import NoCompiler
from baton.testing.step_rig import RigModel, StepRig, make_pool, make_runner
from baton.worker.executors.stepwise import Stepwise
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.base import Forward
from baton.worker.platforms.cpu import CpuPlatform

__all__ = ["RigModel", "make_pool", "make_runner"]

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

SEQUENCES = [[5, 3, 60, 60, 1, 2, 9], [11], [30, 2, 7, 7]]
"""Tokens of three prompts, for one_step."""


def skip_without_a_compiler(error: NoCompiler) -> NoReturn:
    """Where there is a compiler, sources that do not compile are a failure."""
    if "no C compiler" not in str(error):
        raise error
    pytest.skip(str(error))


def load(opened: OpenedModel, *, quantization: Quantization = "none", threads: int = 1, **settings: Any) -> RigModel:
    """As a worker loads it, but exact and on one thread unless told otherwise. `settings`: WorkerConfig's.

    compute="native" skips the test where there is no compiler; without it such a machine runs the test in torch.
    """
    try:
        loaded = CpuPlatform().load(opened, WorkerConfig(quantization=quantization, threads=threads, **settings))
    except NoCompiler as error:
        skip_without_a_compiler(error)
    return RigModel(opened.config, loaded)


def load_path(path: Path, **settings: Any) -> RigModel:
    return load(open_model(path), **settings)


TINY_SEED = 3
"""Gives lively answers: few tokens come twice in a row."""


def tiny_model(config: ModelConfig = TINY, weights: WeightSource | None = None, **settings: Any) -> RigModel:
    weights = weights or DummyWeights(config, TINY_SEED)
    return load(OpenedModel(Path(), config, weights), **settings)


def tiny_oracle(config: ModelConfig = TINY) -> Decoder:
    """The same weights in torch."""
    return build_model(config, DummyWeights(config, TINY_SEED))


def forward_of(model: RigModel) -> Forward:
    executor = model.loaded.with_pool(make_pool(model, blocks=16, block_size=4))
    assert isinstance(executor, Stepwise)
    return executor.forward


def one_step(sequences: list[list[int]], block_size: int = 4) -> FlatBatch:
    """Every sequence as a whole, each in blocks of its own."""
    counts = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *counts]).astype(np.int64)
    width = -(-max(counts) // block_size)
    tables = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    spans = Spans(tables, np.arange(len(counts)), starts, np.zeros(len(counts), np.int64))
    positions = np.concatenate([np.arange(count) for count in counts])
    return FlatBatch(spans, np.concatenate(sequences).astype(np.int32), positions, np.ones(len(counts), bool))


class Rig(StepRig):
    dispatch = StepRig.dispatch
    words = StepRig.token_logprobs


def generate(model: RigModel, prompts: dict[str, list[int]], *, rig: dict[str, Any] | None = None, **sampling: Any):
    """Tokens of these prompts, all submitted at once."""
    one = Rig(model, **(rig or {}))
    for name, prompt in prompts.items():
        one.submit(name, prompt, **sampling)
    return one.run()
