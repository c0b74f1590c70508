"""A model's matrices as one step wants them: queries, keys and values as one product, gate and up as another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.errors import InvalidConfig
from baton.models.config import ModelConfig
from baton.models.parameters import EMBED, FINAL_NORM, LM_HEAD, expected_shapes, expert_names
from baton.worker.cuda.kernels.fp8 import ALIGNED, Scales, quantise

Take = Callable[[Sequence[str]], Tensor]
"""The parameters of these names (models/parameters.py), stacked along their first dimension: torch_weights.Weights.take."""
TakeFp8 = Callable[[Sequence[str]], tuple[Tensor, Scales] | None]
"""The same in fp8 as it is stored, or None where it is not, or not so that it could be one matrix: loader.DeviceWeights."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    weight: Tensor
    "[outputs, inputs]."
    bias: Tensor | None
    scales: Scales | None = None
    "Where weights are in fp8 (kernels/fp8.py); of experts, those of all outputs one behind another."

    def of_experts(self, count: int) -> LinearWeights:
        """The same as [experts, outputs, inputs]."""
        return replace(self, weight=self.weight.view(count, -1, self.weight.shape[1]))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: LinearWeights
    head_norms: tuple[Tensor, Tensor] | None
    "Of queries and of keys."
    output: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights
    router: Tensor | None = None
    "[experts, hidden]. Where there is one, `gate_up` and `down` are of all experts: [experts, outputs, inputs]."


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    "[vocabulary, hidden]; the embedding itself where the model ties them."

    def in_fp8(self) -> list[LinearWeights]:
        """Matrices of layers that are kept in 8 bits, those of experts too."""
        every = (one for layer in self.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return [one for one in every if one.scales is not None]


def take_weights(
    config: ModelConfig, take: Take, *, fp8: bool = False, take_fp8: TakeFp8 = lambda names: None
) -> DecoderWeights:
    """fp8: matrices of layers are kept in 8 bits; embedding, head and norms are not."""
    embedding = take([EMBED])
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(config, take, take_fp8, layer, fp8) for layer in range(config.layers)),
        final_norm=take([FINAL_NORM]),
        head=embedding if config.tied_embeddings else take([LM_HEAD]),
    )


def _layer(config: ModelConfig, take: Take, take_fp8: TakeFp8, layer: int, fp8: bool) -> LayerWeights:
    traits, prefix = config.traits, f"layers.{layer}."

    def matrices(names: Sequence[str]) -> LinearWeights:
        weight, scales = take_fp8(names) or (take(names), None)
        if fp8 and scales is None:
            weight, scales = quantise(weight)
        return LinearWeights(weight, None, scales)

    def linear(names: Sequence[str], bias: bool) -> LinearWeights:
        names = [prefix + name for name in names]
        without = matrices([f"{n}.weight" for n in names])
        return replace(without, bias=take([f"{n}.bias" for n in names])) if bias else without

    head_norms = None
    if traits.qk_norm:
        head_norms = (take([f"{prefix}attention.q_norm.weight"]), take([f"{prefix}attention.k_norm.weight"]))
    attention_norm = take([f"{prefix}attention_norm.weight"])
    qkv = linear(["attention.q", "attention.k", "attention.v"], traits.qkv_bias)
    output = linear(["attention.o"], traits.output_bias)
    mlp_norm = take([f"{prefix}mlp_norm.weight"])
    router, experts = None, config.experts
    if experts is None:
        gate_up, down = linear(["mlp.gate", "mlp.up"], traits.mlp_bias), linear(["mlp.down"], traits.mlp_bias)
    else:
        router = take([f"{prefix}mlp.router.weight"])
        gate_up, down = (
            matrices(expert_names(layer, experts.count, *parts)).of_experts(experts.count)
            for parts in (["gate", "up"], ["down"])
        )
    return LayerWeights(attention_norm, qkv, head_norms, output, mlp_norm, gate_up, down, router)


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0, *, fp8: bool = False
) -> DecoderWeights:
    """Made on the device, in seconds: to measure a model that nobody has downloaded. Of a size that keeps activations alive."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = expected_shapes(config)

    def take(names: Sequence[str]) -> Tensor:
        rows = sum(shapes[name][0] for name in names)
        shape = (rows, *shapes[names[0]][1:])
        made = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        if names[0].endswith("norm.weight"):
            return made.mul_(0.1).add_(1.0)
        return made.mul_(0.1 if names[0].endswith(".bias") else float(shape[-1]) ** -0.5)

    return take_weights(config, take, fp8=fp8)


def refuse_fp8(config: ModelConfig) -> None:
    """Says what is in the way of matrices in 8 bits."""
    inner = config.experts.inner_size if config.experts is not None else config.intermediate_size
    sizes = (config.hidden_size, config.q_size, config.kv_size, inner)
    if any(size % ALIGNED for size in sizes):
        raise InvalidConfig(f"--quantization fp8 needs a model whose widths are multiples of {ALIGNED}; these are {sizes}")
