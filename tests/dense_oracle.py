"""The simplest correct attention, and greedy decoding with it: the oracle of all faster versions. A DenseCache holds the keys
and values of one sequence; a DenseAttention is one step over some sequences:

    caches = [DenseCache(config), DenseCache(config)]
    hidden = model.forward(tokens, positions, DenseAttention(config, [(caches[0], 7), (caches[1], 1)]))

means that the first seven rows belong to the first sequence and the eighth to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.config import Quantization
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.layers.attention import shares_of
from baton.models.load import build_model
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import Progress
from baton.models.names import resolve
from baton.models.open import open_model


class DenseCache:
    """Keys and values of one sequence, layer by layer, each [tokens, kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig) -> None:
        self.keys: list[Tensor | None] = [None] * config.layers
        self.values: list[Tensor | None] = [None] * config.layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new tokens' keys and values; returns all of them."""
        old_k, old_v = self.keys[layer], self.values[layer]
        k = k.clone() if old_k is None else torch.cat((old_k, k))
        v = v.clone() if old_v is None else torch.cat((old_v, v))
        self.keys[layer], self.values[layer] = k, v
        return k, v


class DenseAttention:
    """An AttentionContext: `rows` has the number of rows per sequence, in the order of the flat batch."""

    def __init__(self, config: ModelConfig, rows: Sequence[tuple[DenseCache, int]]) -> None:
        self.config = config
        self.rows = rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /) -> Tensor:
        counts = [count for _, count in self.rows]
        caches = [cache for cache, _ in self.rows]
        parts = zip(caches, *(torch.split(x, counts) for x in (q, k, v)), strict=True)
        return torch.cat([self._one(layer, cache, q, k, v, sinks) for cache, q, k, v in parts])

    def _one(self, layer: int, cache: DenseCache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = cache.extend(layer, k, v)
        sharing = self.config.heads // self.config.kv_heads
        keys, values = keys.repeat_interleave(sharing, dim=1), values.repeat_interleave(sharing, dim=1)
        # The new rows are the last of their sequence.
        key_at = torch.arange(keys.shape[0], device=q.device)
        query_at = key_at[-q.shape[0] :, None]
        visible = key_at <= query_at
        window = self.config.window(layer)
        if window is not None:
            visible &= key_at > query_at - window
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.config.attention_scale
        shares = shares_of(scores.masked_fill(~visible, float("-inf")), sinks)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def all_logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits at every position of one sequence, [tokens, vocab_size], in a single pass."""
    attention = DenseAttention(model.config, [(DenseCache(model.config), len(tokens))])
    ids = torch.tensor(tokens, device=model.device)
    return model.logits(model.forward(ids, torch.arange(len(tokens), device=model.device), attention))


def greedy_tokens(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest next tokens, one after another. Stop tokens do not end it."""
    cache = DenseCache(model.config)
    fresh, at, output = list(prompt), 0, list[int]()
    while len(output) < count:
        positions = torch.arange(at, at + len(fresh), device=model.device)
        attention = DenseAttention(model.config, [(cache, len(fresh))])
        hidden = model.forward(torch.tensor(fresh, device=model.device), positions, attention)
        at += len(fresh)
        fresh = [int(model.logits(hidden[-1:]).argmax())]
        output += fresh
    return output


@dataclass(frozen=True, slots=True)
class LoadedModel:
    path: Path
    "The folder or .gguf file."
    config: ModelConfig
    model: Decoder


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> LoadedModel:
    """`name`: a folder, a .gguf file, an alias or a Hugging Face id. `progress` is called with (bytes done, bytes in total)
    while the weights are read."""
    opened = open_model(resolve(name))
    model = build_model(opened.config, opened.weights, dtype=dtype, device=device, quantization=quantization, progress=progress)
    return LoadedModel(opened.path, opened.config, model)


def dummy_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
) -> Decoder:
    """A model of this shape with random weights; the same seed gives the same model everywhere."""
    return build_model(config, DummyWeights(config, seed), dtype=dtype, device=device, quantization=quantization)
