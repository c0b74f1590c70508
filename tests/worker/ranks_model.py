"""Greedy tokens of a model in C, by one rank or by a part of a set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.config import WorkerConfig
from baton.kvpool.pool import KVPool
from baton.models.config import Experts, ModelConfig, RopeConfig
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.sharded import sharded
from baton.models.open import OpenedModel, open_model
from baton.models.shard import Shard
from baton.native.library import load_best
from baton.worker.flat_batch import FlatBatch, Spans
from baton.worker.forward.native_forward import load_native
from baton.worker.kv_layout import kv_layout

BLOCK_SIZE = 16
PROMPT = [5, 17, 80, 3, 44, 21, 9]
TINY = ModelConfig(
    architecture="llama",
    vocab_size=200,
    layers=3,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    rope=RopeConfig(),
    norm_eps=1e-5,
    tied_embeddings=False,
    experts=Experts(count=6, per_token=2, inner_size=32, normalised=True, layers=(False, True, True)),
    context_tokens_max=128,
)


def opened_part(path: Path | None, shard: Shard) -> OpenedModel:
    opened = open_model(path) if path else OpenedModel(Path(), TINY, DummyWeights(TINY, 3))
    config, weights = sharded(opened.config, opened.weights, shard)
    return replace(opened, config=config, weights=weights)


def greedy(exchange=None, path: Path | None = None, tokens: int = 24, threads: int = 1) -> list[int]:
    opened = opened_part(path, Shard(exchange.rank, exchange.ranks) if exchange else Shard())
    settings = WorkerConfig(threads=threads, quantization="none", kv_dtype="float32")
    loaded = load_native(load_best(), opened, settings, None, exchange)
    pool = KVPool.create(kv_layout(opened.config, BLOCK_SIZE, loaded.kv), 8)
    forward = loaded.with_pool(pool)
    found, at, ids = [], 0, list(PROMPT)
    while len(found) < tokens:
        spans = Spans(np.arange(8, dtype=np.int32)[None], np.zeros(1, np.int64), np.array([0, len(ids)]), np.array([at]))
        flat = FlatBatch(spans, np.array(ids, np.int32), np.arange(at, at + len(ids)), np.ones(1, bool))
        found.append(int(forward.likeliest(forward.hidden(flat)[-1:])[0]))
        at, ids = at + len(ids), found[-1:]
    forward.close()
    return found
