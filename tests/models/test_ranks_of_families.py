"""Every family divided among two ranks gives the logits of one, read from its own files."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from packed_folders import SIZES, write_packed
from tiny_models import CASES, PROMPTS, oracle_model
from torch import Tensor

from baton.errors import InvalidConfig
from baton.models.config import ModelConfig, RopeConfig
from baton.models.load import build_model
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.sharded import sharded
from baton.models.open import open_model
from baton.models.raw_tensor import RawTensor
from baton.models.shard import Shard
from baton.models.tensor_types import Q4_K, Q6_K, TensorType
from dense_oracle import all_logits

ACROSS_HEADS = ("olmo2", "olmo3", "olmoe")
OF_TWO = [case for case in CASES if case not in ACROSS_HEADS]
NEAR = 1e-5


class Threads:
    """Ranks as threads: the simplest exchange there is."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[Tensor | None] = [None] * ranks

    def of(self, rank: int) -> Thread:
        return Thread(self, rank)


class Thread:
    def __init__(self, all_ranks: Threads, rank: int) -> None:
        self.all, self.rank = all_ranks, rank

    def gather(self, part: Tensor) -> Tensor:
        self.all.parts[self.rank] = part.clone()
        self.all.barrier.wait()
        found = torch.stack(self.all.parts)
        self.all.barrier.wait()
        return found

    def sum(self, rows: Tensor) -> None:
        parts = self.gather(rows)
        rows.copy_(parts[0])
        for part in parts[1:]:
            rows += part


def logits_of_ranks(path, ranks: int, prompt: list[int]) -> list[Tensor]:
    def of_file():
        opened = open_model(path)
        return opened.config, opened.weights

    return logits_of_parts(of_file, ranks, prompt)


def logits_of_parts(opened, ranks: int, prompt: list[int]) -> list[Tensor]:
    """`opened`: returns config and weights."""
    threads = Threads(ranks)

    def run(rank: int) -> Tensor:
        model = build_model(*sharded(*opened(), Shard(rank, ranks)), collective=threads.of(rank))
        return all_logits(model, prompt)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def check_two_ranks(path):
    opened = open_model(path)
    expected = all_logits(build_model(opened.config, opened.weights), PROMPTS[3])
    first, second = logits_of_ranks(path, 2, PROMPTS[3])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=NEAR, rtol=NEAR)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", OF_TWO)
def test_two_ranks_give_the_logits_of_one(case, tmp_path):
    oracle_model(case).save_pretrained(tmp_path)
    check_two_ranks(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq-zeros", "gptq-order", "compressed-tensors", "compressed-zeros"])
def test_two_ranks_of_a_folder_in_4_bits(method, tmp_path):
    write_packed(tmp_path, method)
    check_two_ranks(tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_two_ranks_of_a_gguf_file(kind, tmp_path):
    families = pytest.importorskip("gguf_files")
    check_two_ranks(families.write_gguf(tmp_path / "m.gguf", oracle_model("llama", **SIZES), "llama", kind))


@pytest.mark.parametrize("case", ["llama-one-kv-head", "gemma3"])
def test_three_ranks(case, tmp_path):
    oracle_model(case).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    if case == "gemma3":  # two key heads
        with pytest.raises(InvalidConfig, match="2 key/value heads: neither is a multiple of the other"):
            sharded(opened.config, opened.weights, Shard(0, 3))
        return
    expected = all_logits(build_model(opened.config, opened.weights), PROMPTS[1])
    for found in logits_of_ranks(tmp_path, 3, PROMPTS[1]):
        torch.testing.assert_close(found, expected, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("case", ACROSS_HEADS)
def test_a_norm_across_heads_is_refused_by_name(case, tmp_path):
    oracle_model(case).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    with pytest.raises(InvalidConfig, match="qk_norm_across_heads"):
        sharded(opened.config, opened.weights, Shard(0, 2))


class KQuants(DummyWeights):
    """Random bytes in blocks of 256, with sane scales."""

    kind: ClassVar[TensorType]
    scales: ClassVar[slice]
    "Bytes of a block that are its float16 scales."

    def packed(self, name: str) -> bool:
        return name.endswith(".weight") and "norm" not in name and name != "embed.weight"

    def stored(self):
        return {
            name: replace(tensor, type=self.kind, nbytes=self.raw(name).data.nbytes) if self.packed(name) else tensor
            for name, tensor in super().stored().items()
        }

    def raw(self, name: str) -> RawTensor:
        if not self.packed(name):
            return super().raw(name)
        rows, width = self._shapes[name]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        blocks = rng.integers(0, 256, (rows, width // 256, self.kind.block_bytes), np.uint8)
        small = rng.uniform(1e-5, 2e-5, (*blocks.shape[:2], (self.scales.stop - self.scales.start) // 2))
        blocks[..., self.scales] = small.astype(np.float16).view(np.uint8)
        return RawTensor(self.kind, (rows, width), blocks.reshape(rows, -1))


class Q4K(KQuants):
    kind, scales = Q4_K, slice(0, 4)


class Q6K(KQuants):
    kind, scales = Q6_K, slice(208, 210)


def k_quants(inner: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=97, layers=1, hidden_size=256, heads=8, kv_heads=2, head_dim=64,
        intermediate_size=inner, rope=RopeConfig(), norm_eps=1e-5, tied_embeddings=False, context_tokens_max=64,
    )  # fmt: skip


@pytest.mark.parametrize("weights", [Q4K, Q6K])
@pytest.mark.parametrize("inner", [512, 768])
def test_two_ranks_of_k_quants(weights, inner):
    config = k_quants(inner)
    expected = all_logits(build_model(config, weights(config, 3)), PROMPTS[3])
    for found in logits_of_parts(lambda: (config, weights(config, 3)), 2, PROMPTS[3]):
        torch.testing.assert_close(found, expected, atol=NEAR, rtol=NEAR)


def test_fewer_blocks_than_ranks_are_refused():
    config = k_quants(256)
    with pytest.raises(InvalidConfig, match="an MLP of width 256 has 1 blocks of 256, fewer than ranks"):
        sharded(config, Q4K(config, 3), Shard(0, 2))
