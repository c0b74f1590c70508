"""Families as llama.cpp's converter writes them: fused tensors, stacked experts, norms with their 1 in them, pairs together.

The converter itself is not at hand; what it does to each family is written out here a second time, apart from the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import gguf, interleaved
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_logits, oracle_model, rope

from baton.errors import ModelUnsupported
from dense_oracle import all_logits, greedy_tokens, load_model

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.moe_statics.e_score_correction": "exp_probs_b",
    "mlp.gate.e_score_correction": "exp_probs_b",
}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
MOE = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 24}
WINDOW = {"attention.sliding_window": 5}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}

# case: (general.architecture, names that differ, settings beyond the usual ones)
FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "ernie": ("ernie4_5", {}, {}),
    "ernie-moe": ("ernie4_5-moe", {}, {**MOE, "expert_shared_count": 2, "leading_dense_block_count": 1}),
    "phi3": ("phi3", {}, {}),
    "phi3-partial": ("phi3", {}, {"rope.dimension_count": 8}),
    "granite": (
        "granite",
        {},
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.2, "logit_scale": 4.0},
    ),
    "smollm3": ("smollm3", {}, {}),
    "smollm3-scaled": ("smollm3", {}, {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}),
    "olmo2": ("olmo2", AFTER, {}),
    "olmo3-four": ("olmo2", AFTER, {**WINDOW, **YARN, "attention.sliding_window_pattern": [True, True, True, False]}),
    "olmoe": ("olmoe", {}, {"expert_count": 5, "expert_used_count": 2}),
    "exaone4-four": ("exaone4", AFTER, {**WINDOW, **LINEAR}),
    "exaone4-full": ("exaone4", AFTER, {}),
    "seed-oss": ("seed_oss", {"post_attention_layernorm": "post_attention_norm"}, {}),
    "gemma": ("gemma", {}, {}),
    "glm": ("chatglm", {}, {"rope.dimension_count": 8}),
    "glm-fused": ("chatglm", {}, {"rope.dimension_count": 8, "attention.key_length": None, "attention.value_length": None}),
    "glm4": (
        "glm4",
        {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
        {"rope.dimension_count": 8},
    ),
    "glm4-moe": (
        "glm4moe",
        {"post_attention_layernorm": "post_attention_norm"},
        {
            **MOE,
            "rope.dimension_count": 8,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
        },
    ),
    "cohere": ("command-r", {}, {"logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5}),
    "cohere2-scaled": ("cohere2", {}, {**LINEAR, **WINDOW, "logit_scale": 0.0625, "attention.layer_norm_epsilon": 1e-5}),
    "stablelm": ("stablelm", {}, {"rope.dimension_count": 2, "attention.layer_norm_epsilon": 1e-5}),
    "gemma3-six": ("gemma3", {**AFTER, "pre_feedforward_layernorm": "ffn_norm"}, WINDOW),
    "gemma3-scaled": ("gemma3", {**AFTER, "pre_feedforward_layernorm": "ffn_norm"}, {**WINDOW, **LINEAR}),
    "qwen3-moe": ("qwen3moe", {}, MOE),
    "gpt-oss": (
        "gpt-oss",
        {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        {
            **MOE,
            "expert_feed_forward_length": 32,
            **WINDOW,
            **YARN,
        },
    ),
    "mixtral": ("llama", {}, {**MOE, "expert_feed_forward_length": 56}),
    "qwen2-moe-all": ("qwen2moe", {}, {**MOE, "expert_shared_feed_forward_length": 20}),
}
SIDE_BY_SIDE = ("llama", "granite", "smollm3")
"""Whose rows the converter puts side by side. (Others of llama.cpp's kind NORM are so in their own files.)"""
FOUR = {"hidden_size": 48, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5, **rope("linear", factor=3.0)}
SIX = {
    "num_hidden_layers": 6,
    "sliding_window": 5,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
SCALED_SIX = {
    "rope_parameters": {
        "full_attention": rope("linear", factor=3.0)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
THREE_OF_FOUR = {
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
OF_OLMO3 = {
    "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=16)["rope_parameters"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SCALED_SMOLLM3 = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0)


MORE_CASES = {
    "gemma3-six": ("Gemma3", SIX),
    "gemma3-scaled": ("Gemma3", {**SIX, **SCALED_SIX}),
    "cohere2-scaled": ("Cohere2", FOUR),
    "smollm3-scaled": ("SmolLM3", {"num_hidden_layers": 4, **SCALED_SMOLLM3}),
    "olmo3-four": ("Olmo3", {**THREE_OF_FOUR, "rope_parameters": OF_OLMO3}),
    "exaone4-four": ("Exaone4", {**THREE_OF_FOUR, **rope("linear", factor=3.0)}),
    "glm-fused": ("Glm", {"hidden_size": 96}),
    "qwen2-moe-all": ("Qwen2Moe", {**CASES["qwen2-moe"][1], "mlp_only_layers": []}),
}
"""Models of FAMILIES that tiny_models.py does not have."""


def oracle_and_file(case: str, path: Path) -> tuple[Any, Path]:
    """A family's model, and its file at `path`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, row in MORE_CASES.items():
            patch.setitem(CASES, name, row)
        oracle = oracle_model(case)
    if case == "gpt-oss":
        round_experts(oracle)
    return oracle, write(path, oracle, *FAMILIES[case], fuse=case == "glm-fused")


@pytest.mark.parametrize("case", FAMILIES)
def test_a_family_from_its_gguf_file(case, tmp_path):
    oracle, path = oracle_and_file(case, tmp_path / "m.gguf")
    model = load_model(path).model
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
        found = greedy_tokens(model, prompt, 6)
        assert found == oracle_greedy(oracle, prompt, 6, found)


@pytest.mark.parametrize(
    ("pattern", "is_ours"),
    [
        (6, True),
        ([True] * 5 + [False], True),
        (4, False),
        (0, False),
        ([True] * 6, False),
        ([False] + [True] * 5, False),
        ("x", False),
    ],
)
def test_windows_of_other_layers_are_refused(pattern, is_ours, monkeypatch, tmp_path):
    """A file may name the layers that have a window. Answers of other layers would be silently wrong."""
    monkeypatch.setitem(CASES, "gemma3-six", MORE_CASES["gemma3-six"])
    architecture, names, settings = FAMILIES["gemma3-six"]
    settings = settings | {"attention.sliding_window_pattern": pattern}
    path = write(tmp_path / "m.gguf", oracle_model("gemma3-six"), architecture, names, settings)
    if is_ours:
        assert load_model(path).config.traits.layer_windows == (5,) * 5 + (None,)
    else:
        with pytest.raises(ModelUnsupported, match="sliding_window_pattern"):
            load_model(path)


def test_positions_in_sections_are_refused(tmp_path):
    """Of GLM-4.1V: there the converter stores queries and keys in another order."""
    architecture, names, settings = FAMILIES["glm4"]
    settings = settings | {"rope.dimension_sections": [2, 3, 3, 0]}
    path = write(tmp_path / "m.gguf", oracle_model("glm4"), architecture, names, settings)
    with pytest.raises(ModelUnsupported, match="rotary positions in sections are not supported"):
        load_model(path)


def write(
    path: Path, oracle: Any, architecture: str, names: dict[str, str], settings: dict[str, Any], *, fuse: bool = False
) -> Path:
    """`settings`: None for one that the converter does not write. `fuse`: queries, keys and values are one tensor."""
    config = oracle.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = config.rope_parameters
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rotary.get("full_attention", rotary)["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 1e-5)),
        **settings,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is None:
            continue
        adds = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        adds[type(value)](f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    tied = config.tie_word_embeddings
    found = tensors(oracle, architecture, {**COMMON, **names})
    for name, array in (fused(found) if fuse else found).items():
        array = np.ascontiguousarray(array)
        if architecture == "gpt-oss" and name.endswith("_exps.weight"):  # as llama.cpp has them
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif not (tied and name == "output.weight"):
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fused(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As in files of ChatGLM, whose own code has one matrix for the three."""
    whole = {}
    for name, array in found.items():
        if ".attn_q." in name:
            name, array = (
                name.replace("attn_q", "attn_qkv"),
                np.concatenate([found[name.replace("attn_q", f"attn_{part}")] for part in "qkv"]),
            )
        if ".attn_k." not in name and ".attn_v." not in name:
            whole[name] = array
    return whole


def of_gpt_oss(prefix: str, kind: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Gates and ups alternate, and matrices are turned."""
    if kind == "sinks":
        return {f"{prefix}attn_sinks.weight": array}
    end = "bias" if kind.endswith("_bias") else "weight"
    array = array if end == "bias" else array.transpose(0, 2, 1)
    if kind.startswith("down"):
        return {f"{prefix}ffn_down_exps.{end}": array}
    return {f"{prefix}ffn_gate_exps.{end}": array[:, ::2], f"{prefix}ffn_up_exps.{end}": array[:, 1::2]}


def round_experts(oracle: Any) -> None:
    """To what MXFP4 can say: so a file in it holds the same model."""
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, parameter in oracle.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name:
            rows = np.ascontiguousarray(parameter.detach().numpy().transpose(0, 2, 1))
            rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
            parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(rounded.reshape(rows.shape).transpose(0, 2, 1))))


def tensors(oracle: Any, architecture: str, names: dict[str, str]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in oracle.state_dict().items():
        array, (module, _, kind) = tensor.numpy(), name.rpartition(".")
        if architecture == "gpt-oss" and ("experts" in name or "sinks" in name):
            found |= of_gpt_oss(f"blk.{name.split('.')[2]}.", kind, array)
            continue
        if name.endswith("e_score_correction_bias"):
            module, kind = name.removesuffix("_bias"), "bias"
            array = array.reshape(-1)
        if module in TOP:
            found[f"{TOP[module]}.{kind}"] = array
            continue
        _, _, layer, module = module.split(".", 3) if not module.endswith("experts") else (*module.split(".")[:3], "experts")
        module = module.replace("mlp.gate.moe_statics", "mlp.moe_statics").replace("block_sparse_moe", "mlp")
        if module == "experts":  # in memory all experts are one tensor: [experts, gate and up, hidden]
            gate, up = np.split(array, 2, 1) if kind == "gate_up_proj" else (array, None)
            found[f"blk.{layer}.ffn_{'gate' if up is not None else 'down'}_exps.weight"] = gate
            if up is not None:
                found[f"blk.{layer}.ffn_up_exps.weight"] = up
            continue
        theirs = names[module]
        if theirs == "ffn_gate_inp_shexp":
            array = array.reshape(-1)
        if architecture in SIDE_BY_SIDE and theirs in ("attn_q", "attn_k"):
            config = oracle.config
            array = interleaved(array, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
        found[f"blk.{layer}.{theirs}.{kind}"] = array
    if architecture in ("gemma", "gemma3"):
        found = {name: array + 1 if "norm" in name else array for name, array in found.items()}
    return found
