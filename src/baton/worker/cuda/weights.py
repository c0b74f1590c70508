"""A model's matrices in the layout of a step: queries, keys and values as one product, gate and up as another."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.errors import InvalidConfig
from baton.models.config import ModelConfig
from baton.models.parameters import EMBED, LM_HEAD, expected_shapes, expert_names, layer_norms
from baton.worker.cuda.kernels.add_norm import NormWeights
from baton.worker.cuda.kernels.fp8 import ALIGNED, Scales, quantise
from baton.worker.cuda.kernels.grouped_gemm_mxfp4 import split_mxfp4

Take = Callable[[Sequence[str]], Tensor]
"""Takes the parameters of these names (models/parameters.py), stacked along their first dimension:
torch_weights.Weights.take."""
TakeFp8 = Callable[[Sequence[str]], tuple[Tensor, Scales] | None]
"""Takes parameters stored in fp8; None if they are not, or cannot be one matrix: loader.DeviceWeights."""

TakeMxfp4 = Callable[[Sequence[str]], Tensor | None]
"""Takes parameters stored in MXFP4; None if they are not: torch_weights.Weights.take_mxfp4."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    weight: Tensor
    "The matrix, [outputs, inputs]."
    bias: Tensor | None
    scales: Scales | None = None
    "Scales of fp8 weights (kernels/fp8.py); for experts those of all outputs in order. None: not in fp8."
    exponents: Tensor | None = None
    "uint8 [outputs, inputs / 32] of experts in MXFP4: `weight` then has two per byte (kernels/grouped_gemm_mxfp4.py)."

    def of_experts(self, count: int) -> LinearWeights:
        """The same weights as [experts, outputs, inputs]."""
        return replace(self, weight=self.weight.view(count, -1, self.weight.shape[1]))


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class RouterWeights:
    weight: Tensor
    "The router's matrix, [experts, hidden]."
    bias: Tensor | None = None
    correction: Tensor | None = None
    "The router's bias, float32 [experts]."
    shared: MlpWeights | None = None
    shared_gate: Tensor | None = None
    "The gate of the shared expert, [1, hidden]."


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaLayerWeights:
    attention_norm: NormWeights | None
    qkv: LinearWeights
    head_norms: tuple[Tensor, Tensor] | None
    "Norms of queries and keys."
    sinks: Tensor | None = None
    "[heads]: a score per head that takes part in the softmax and has no value."
    output: LinearWeights
    attention_post_norm: NormWeights | None = None
    mlp_norm: NormWeights | None
    gate_up: LinearWeights
    down: LinearWeights
    mlp_post_norm: NormWeights | None = None
    router: RouterWeights | None = None
    "Experts, if any: `gate_up` and `down` are then of all experts, [experts, outputs, inputs]."

    def linears(self) -> list[LinearWeights]:
        shared = None if self.router is None else self.router.shared
        of_shared = [] if shared is None else [shared.gate_up, shared.down]
        return [self.qkv, self.output, self.gate_up, self.down, *of_shared]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: tuple[CudaLayerWeights, ...]
    final_norm: NormWeights
    head: Tensor
    "The output head, [vocabulary of this rank, hidden]; rows of the embedding if tied."

    def in_fp8(self) -> list[LinearWeights]:
        """Whether matrices of layers are in 8 bits, including experts."""
        return [one for layer in self.layers for one in layer.linears() if one.scales is not None]


def take_weights(
    config: ModelConfig,
    take: Take,
    *,
    fp8: bool = False,
    take_fp8: TakeFp8 = lambda names: None,
    take_mxfp4: TakeMxfp4 = lambda names: None,
) -> DecoderWeights:
    """fp8: matrices of layers are converted to 8 bits; embedding, head, norms and 4-bit matrices are not."""
    embedding = take([EMBED])
    taker = _Taker(config, take, take_fp8, take_mxfp4, fp8)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(taker.layer(layer) for layer in range(config.layers)),
        final_norm=taker.norm("final_norm"),
        head=embedding[config.head_rows.start : config.head_rows.stop] if config.tied_embeddings else take([LM_HEAD]),
    )


@dataclass(frozen=True, slots=True)
class _Taker:
    config: ModelConfig
    take: Take
    take_fp8: TakeFp8
    take_mxfp4: TakeMxfp4
    fp8: bool

    def layer(self, layer: int) -> CudaLayerWeights:
        """Loads the matrices and norms of one layer."""
        traits, prefix = self.config.traits, f"layers.{layer}."
        names = layer_norms(self.config)
        norms = [self.norm(f"{prefix}{name}") if name in names else None for name in NORMS]
        head_norms = None
        if traits.qk_norm:
            head_norms = (self.take([f"{prefix}attention.q_norm.weight"]), self.take([f"{prefix}attention.k_norm.weight"]))
        qkv = self.linear([f"{prefix}attention.{part}" for part in "qkv"], traits.qkv_bias)
        output = self.linear([f"{prefix}attention.o"], traits.output_bias)
        if self.config.layer_experts(layer) is None:
            router, mlp = None, self.mlp(f"{prefix}mlp.", traits.mlp_bias)
        else:
            router, mlp = self.router(f"{prefix}mlp."), self.experts(layer)
        return CudaLayerWeights(
            attention_norm=norms[0],
            qkv=qkv,
            head_norms=head_norms,
            output=output,
            sinks=self.take([f"{prefix}attention.sinks"]) if traits.sinks else None,
            attention_post_norm=norms[1],
            mlp_norm=norms[2],
            gate_up=mlp.gate_up,
            down=mlp.down,
            mlp_post_norm=norms[3],
            router=router,
        )

    def norm(self, name: str) -> NormWeights:
        traits = self.config.traits
        bias = self.take([f"{name}.bias"]) if traits.norm_bias else None
        return NormWeights(self.take([f"{name}.weight"]), bias, traits.layer_norm)

    def mlp(self, prefix: str, bias: bool) -> MlpWeights:
        return MlpWeights(self.linear([f"{prefix}gate", f"{prefix}up"], bias), self.linear([f"{prefix}down"], bias))

    def router(self, prefix: str) -> RouterWeights:
        experts = self.config.experts
        assert experts is not None
        return RouterWeights(
            self.take([f"{prefix}router.weight"]),
            self.take([f"{prefix}router.bias"]) if experts.bias else None,
            self.take([f"{prefix}router.correction"]).float() if experts.correction else None,
            self.mlp(f"{prefix}shared.", False) if experts.shared_size else None,
            self.take([f"{prefix}shared_gate.weight"]) if experts.shared_gate else None,
        )

    def experts(self, layer: int) -> MlpWeights:
        experts = self.config.experts
        assert experts is not None
        own, found = self.config.own_experts, []
        for parts in (["gate", "up"], ["down"]):
            of_all = self.expert_matrices(expert_names(layer, own, *parts)).of_experts(len(own))
            bias = self.take(expert_names(layer, own, *parts, kind="bias")) if experts.bias else None
            found.append(replace(of_all, bias=bias))
        return MlpWeights(*found)

    def linear(self, names: Sequence[str], bias: bool) -> LinearWeights:
        without = self.matrices([f"{name}.weight" for name in names])
        return replace(without, bias=self.take([f"{name}.bias" for name in names])) if bias else without

    def expert_matrices(self, names: Sequence[str]) -> LinearWeights:
        """The matrices of experts. MXFP4 stays packed: grouped_gemm_mxfp4.py computes with it. Other products do not, so `take`
        unpacks."""
        packed = self.take_mxfp4(names)
        if packed is None:
            return self.matrices(names)
        weight, exponents = split_mxfp4(packed)
        return LinearWeights(weight, None, exponents=exponents)

    def matrices(self, names: Sequence[str]) -> LinearWeights:
        weight, scales = self.take_fp8(names) or (self.take(names), None)
        if self.fp8 and scales is None:
            weight, scales = quantise(weight)
        return LinearWeights(weight, None, scales)


NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0, *, fp8: bool = False
) -> DecoderWeights:
    """Random weights, created on the device in seconds: to measure a model without its download. Scaled to keep activations in
    range."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = expected_shapes(config)

    def take(names: Sequence[str]) -> Tensor:
        rows = sum(shapes[name][0] for name in names)
        shape = (rows, *shapes[names[0]][1:])
        if not config.shard.is_whole:  # Seeded by name: every rank gets the same values for weights that all ranks have.
            generator.manual_seed(zlib.crc32(f"{seed} {names[0]}".encode()))
        made = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        if names[0].endswith("norm.weight"):
            return made.mul_(0.1).add_(1.0)
        return made.mul_(0.1 if names[0].endswith(".bias") else float(shape[-1]) ** -0.5)

    return take_weights(config, take, fp8=fp8)


def refuse_fp8(config: ModelConfig) -> None:
    """Refuses fp8 if the model's sizes do not allow 8-bit matrices."""
    experts = config.experts
    inner = [config.intermediate_size] if experts is None else [experts.inner_size, experts.shared_size]
    if experts is not None and experts.layers:
        inner.append(config.intermediate_size)
    sizes = (config.hidden_size, config.q_size, config.kv_size, *inner)
    if any(size % ALIGNED for size in sizes):
        raise InvalidConfig(f"--quantization fp8 needs a model whose widths are multiples of {ALIGNED}; these are {sizes}")
