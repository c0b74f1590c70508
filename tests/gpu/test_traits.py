"""Every trait of a decoder, alone and together, in whole steps: logits of our kernels against those of torch
with the same random weights, for many rows, a few, and one."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")

from step_rig import StepRig  # noqa: E402

from baton.models.config import NO_ROPE, Experts, LinearScaling, ModelConfig, RopeConfig, Traits, YarnScaling  # noqa: E402
from baton.models.decoder import Decoder  # noqa: E402
from baton.models.loaders.dummy import DummyWeights  # noqa: E402
from baton.models.loaders.weights import RawWeights  # noqa: E402
from baton.models.raw_tensor import RawTensor  # noqa: E402
from baton.models.tensor_types import MXFP4  # noqa: E402
from baton.models.torch_weights import Weights  # noqa: E402
from dense_oracle import all_logits  # noqa: E402

TINY = ModelConfig(
    architecture="llama", vocab_size=97, layers=2, hidden_size=48, heads=6, kv_heads=2, head_dim=16, intermediate_size=40,
    rope=RopeConfig(), norm_eps=1e-5, tied_embeddings=False, context_tokens_max=128,
)  # fmt: skip
MIXTURE = Experts(count=6, per_token=2, inner_size=24, normalised=True)
ROPES = (RopeConfig(theta=500.0, scaling=LinearScaling(factor=2.0), dimensions=8), NO_ROPE)
YARN = RopeConfig(scaling=YarnScaling(factor=4.0, original_context=32, attention_factor=1.2, truncate=False))
NORMED = Traits(qk_norm=True, qk_norm_across_heads=True, layer_norm=True, norm_bias=True)
TRAITS = {
    "norms after": Traits(norms="after"),
    "norms before and after": Traits(norms="both"),
    "LayerNorm": Traits(layer_norm=True),
    "LayerNorm with biases": Traits(layer_norm=True, norm_bias=True),
    "parallel": Traits(parallel=True, layer_norm=True),
    "parallel RMSNorm": Traits(parallel=True),
    "GELU": Traits(activation="gelu_tanh"),
    "clamped SwiGLU": Traits(activation="swiglu_oai", mlp_bias=True),
    "norm across heads": Traits(qk_norm=True, qk_norm_across_heads=True),
    "scales": Traits(embedding_scale=7.0, attention_scale=0.11),
    "sinks": Traits(sinks=True, layer_windows=(5, None)),
    "ropes and windows": Traits(layer_ropes=ROPES, layer_windows=(5, None)),
    "all but parallel": replace(
        NORMED, norms="both", activation="gelu_tanh", embedding_scale=7.0, attention_scale=0.11, layer_ropes=ROPES,
        layer_windows=(None, 5), qkv_bias=True, output_bias=True, mlp_bias=True,
    ),
    "all, parallel": replace(NORMED, parallel=True, activation="gelu_tanh", embedding_scale=7.0, layer_ropes=(YARN, ROPES[0])),
}  # fmt: skip
EXPERTS = {
    "dense first": replace(MIXTURE, layers=(False, True)),
    "shared": replace(MIXTURE, shared_size=20, layers=(True, False)),
    "shared with a gate": replace(MIXTURE, shared_size=72, shared_gate=True, normalised=False),
    "sigmoid with a correction": replace(MIXTURE, scoring="sigmoid", correction=True, scale=1.5, shared_size=20),
}
CASES = {name: replace(TINY, traits=traits) for name, traits in TRAITS.items()}
CASES |= {name: replace(TINY, experts=experts) for name, experts in EXPERTS.items()}
CASES["experts between norms"] = replace(TINY, experts=EXPERTS["shared with a gate"], traits=Traits(norms="both"))
CASES["experts behind LayerNorm, parallel"] = replace(
    TINY, experts=EXPERTS["shared"], traits=Traits(layer_norm=True, norm_bias=True, parallel=True, activation="gelu_tanh")
)
CASES["gpt-oss"] = replace(
    TINY, hidden_size=96, rope=YARN, experts=replace(MIXTURE, inner_size=64, bias=True),
    traits=Traits(sinks=True, activation="swiglu_oai", layer_windows=(5, None), qkv_bias=True, output_bias=True),
)  # fmt: skip
QUICK = ("all but parallel",)


def bound(place, config):
    """In bfloat16 a row may get another expert, where two are about equal."""
    return 2e-5 if place.dtype == torch.float32 else 0.5 if config.experts else 0.06


class FourBits(DummyWeights):
    """Matrices of experts are in MXFP4."""

    parts = (".experts.",)

    def packed(self, name):
        return name.endswith("weight") and "norm" not in name and any(part in name for part in self.parts)

    def stored(self):
        return {
            name: replace(tensor, type=MXFP4, nbytes=MXFP4.row_bytes(tensor.shape[1]) * tensor.shape[0])
            if self.packed(name)
            else tensor
            for name, tensor in super().stored().items()
        }

    def raw(self, name):
        raw = super().raw(name)
        if not self.packed(name):
            return raw
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        blocks = rng.integers(0, 256, (raw.rows, raw.row_elements // 32, 17), np.uint8)
        blocks[:, :, 0] = rng.integers(121, 125, blocks.shape[:2])
        return RawTensor(MXFP4, raw.shape, blocks.reshape(raw.rows, -1))


class AllInFourBits(FourBits):
    """As a GGUF file may have them: attention, dense MLPs and shared experts too."""

    parts = (".attention.", ".mlp.")

    def packed(self, name):
        return super().packed(name) and "router" not in name


def check(place, config, weights=DummyWeights, **settings):
    from baton.worker.cuda.weights import take_weights

    source = Weights(RawWeights(weights(config, 3), config), dtype=place.dtype, device=place.device)
    taken = take_weights(config, source.take, take_mxfp4=source.take_mxfp4)
    if weights is FourBits:
        assert taken.layers[0].gate_up.weight.dtype == torch.uint8, "kept in 4 bits"
    rig = StepRig(config, taken, slots=8, context=128, rows=128, **settings)
    model = Decoder(config, Weights(RawWeights(weights(config, 3), config)))
    prompts = {slot: place.rng.integers(0, 97, count).tolist() for slot, count in ((3, 38), (5, 12))}
    wanted = {slot: all_logits(model, tokens) for slot, tokens in prompts.items()}
    # Many rows, a chunk of another among them; then few; one alone.
    steps = [({3: (0, 36), 5: (0, 4)}, None), ({5: (4, 12), 3: (36, 37)}, None), ({3: (37, 38)}, 1)]
    for work, bucket in steps:
        given = {slot: (begin, prompts[slot][begin:end]) for slot, (begin, end) in work.items()}
        _, logits = rig.run(given, bucket=bucket, draws=False)
        for row, (slot, (_, end)) in enumerate(work.items()):
            right = wanted[slot][end - 1].double()
            error = ((logits[row].cpu().double() - right).norm() / right.norm()).item()
            assert error < bound(place, config), f"{error} of a row of {work}"


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_steps_have_the_logits_of_torch(place, case):
    check(place, CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*QUICK, "experts between norms", "all, parallel", "sigmoid with a correction"])
def test_deterministic_steps_too(place, case):
    check(place, CASES[case], deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpt_oss_with_experts_in_4_bits(place, deterministic):
    check(place, CASES["gpt-oss"], FourBits, deterministic=deterministic)


@pytest.mark.slow
def test_experts_of_a_single_block(place):
    """Rows of 32 inputs in MXFP4."""
    config = CASES["gpt-oss"]
    check(place, replace(config, experts=replace(config.experts, inner_size=32)), FourBits)


def test_no_trait_is_missing(place):
    """`cuda_lacks` names none of these, so the GPU's platform takes our kernels for them."""
    from baton.worker.platforms.lacks import cuda_lacks

    assert {name: cuda_lacks(config) for name, config in CASES.items() if cuda_lacks(config)} == {}


def test_only_matrices_of_experts_stay_in_mxfp4():
    """Products of other matrices would take the packed bytes for numbers."""
    from baton.worker.cuda.weights import take_weights

    mixture = replace(MIXTURE, inner_size=64, shared_size=32, layers=(False, True))
    config = replace(TINY, hidden_size=96, intermediate_size=64, experts=mixture)
    source, again = (Weights(RawWeights(AllInFourBits(config, 3), config)) for _ in range(2))
    dense, sparse = take_weights(config, source.take, take_mxfp4=source.take_mxfp4).layers
    assert sparse.router is not None
    assert sparse.router.shared is not None
    assert sparse.gate_up.exponents is not None
    plain = (dense.qkv, dense.output, dense.gate_up, dense.down, sparse.qkv, sparse.router.shared.down)
    assert all(one.exponents is None and one.weight.dtype == torch.float32 for one in plain)
    assert torch.equal(dense.output.weight, again.take(["layers.0.attention.o.weight"]))
