"""Checkpoints in fp8 with scales of blocks on the GPU: loaded as they are, and logits as float32 has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_cuda_executor import answers, load, prompts

sys.path.append(str(Path(__file__).parent.parent / "models"))
torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="makes the models")

from fp8_files import write_in_fp8  # noqa: E402
from tiny_models import CASES, MOE, ODD, oracle_model  # noqa: E402

from baton.models.open import open_model  # noqa: E402

SIZES = {"vocab_size": 500, "max_position_embeddings": 512}
WHOLE = {**ODD, **SIZES, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
SHAPES = {
    "whole blocks": ("Qwen3", WHOLE),
    "last blocks smaller": ("Qwen3", {**WHOLE, "hidden_size": 192, "intermediate_size": 320, "num_key_value_heads": 1}),
    "not to be one matrix": ("Llama", {**WHOLE, "intermediate_size": 1040}),
    "biases": ("Qwen2", {**WHOLE, "hidden_size": 640}),
    "experts": ("Qwen3Moe", {**WHOLE, **MOE, "moe_intermediate_size": 192}),
    "experts that are unpacked": ("Qwen3Moe", {**WHOLE, **MOE, "moe_intermediate_size": 208}),
}
KEPT = ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.experts.3.down_proj", "model.layers.2.self_attn.k_proj")


@pytest.fixture(scope="module", params=SHAPES)
def opened(request, tmp_path_factory):
    CASES["in fp8"] = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("fp8")
    oracle_model("in fp8").save_pretrained(folder)
    write_in_fp8(folder, KEPT)
    return open_model(folder)


@pytest.fixture(scope="module")
def wanted(opened):
    """Unpacked to float32, and multiplied on the CPU."""
    model = load("cpu", opened.config, opened=opened)
    return answers(model, prompts(5, seed=11), prompt_logprobs=0, max_tokens=8)


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({}, 2e-4),
        ({"deterministic": True}, 2e-4),
        ({"compute": "torch"}, 2e-4),
        ({"dtype": "bfloat16", "deterministic": True}, 0.03),
        ({"dtype": "bfloat16"}, 0.1),  # more than 32 rows are rounded too
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_float32(opened, wanted, more, bound):
    requests = prompts(5, seed=11)
    found = answers(load("cuda", opened.config, opened=opened, **more), requests, prompt_logprobs=0, max_tokens=8)
    off = [
        abs(found[2][name][position].logprob - wanted[2][name][position].logprob)
        for name, prompt in requests.items()
        for position in range(1, len(prompt))
    ]
    # In bfloat16 a row may get another expert, where two are about equal.
    assert sum(off) / len(off) < (3 * bound if opened.config.experts and "dtype" in more else bound)
    if bound < 1e-3:
        assert found[0] == wanted[0], "what is decoded, in batches and in the end alone"


def test_matrices_stay_in_8_bits(opened):
    """All but those that the checkpoint has in other types, or beside such."""
    from baton.models.loaders.weights import RawWeights
    from baton.worker.cuda.loader import DeviceWeights
    from baton.worker.cuda.weights import take_weights

    with DeviceWeights(RawWeights(opened.weights, opened.config), "bfloat16", opened.files) as source:
        weights = take_weights(opened.config, source.take, take_fp8=source.take_fp8)
    experts = opened.config.experts
    unpacked = opened.config.intermediate_size == 1040 or (experts is not None and experts.inner_size % 64)
    assert len(weights.in_fp8()) == 3 * 4 - 2 - (3 if unpacked else 0)
    assert all(one.weight.dtype == torch.float8_e4m3fn for one in weights.in_fp8())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_unpacked_on_the_device_is_what_a_cpu_unpacks(opened, dtype):
    """To the last bit: a value is rounded once."""
    from baton.models.loaders.weights import RawWeights
    from baton.models.torch_weights import Weights
    from baton.worker.cuda.loader import DeviceWeights

    names = [name for name in opened.weights.stored() if name.endswith(("down.weight", "attention.q.weight"))]
    cpu = Weights(RawWeights(opened.weights, opened.config), dtype=getattr(torch, dtype))
    with DeviceWeights(RawWeights(opened.weights, opened.config), dtype, opened.files) as source:
        found = {name: source.take([name]) for name in names}
    for name, weight in found.items():
        assert torch.equal(weight.cpu(), cpu.take([name])), name
