"""A folder that `baton serve` can serve within seconds: a tiny random Llama (or Qwen3 with experts) and a tokenizer of single
bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

SPECIAL = ("<|start|>", "<|end|>")
VOCABULARY = len(SPECIAL) + 256
CONTEXT = 512
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
"""To be given to make_model."""


def make_model(
    folder: Path, seed: int = 7, *, special: tuple[str, ...] = SPECIAL, template: str = TEMPLATE, **changes: Any
) -> Path:
    """`changes`: of CONFIG. `special`: special tokens, of which the first two are those of SPECIAL."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "vocab_size": len(special) + 256, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(np.random.default_rng(seed), config), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(special).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_draft_model(folder: Path, model: Path) -> Path:
    """A model that is often right: the weights of `model` with noise."""
    shutil.copytree(model, folder)
    random, weights = np.random.default_rng(99), load_file(model / "model.safetensors")
    noisy = {name: one + 0.08 * one.std() * random.standard_normal(one.shape, np.float32) for name, one in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(random: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Large enough that every part matters, and that the two best logits are well apart."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    size = config["vocab_size"], hidden
    shapes = {"model.embed_tokens": size, "lm_head": size}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            **_mlp_shapes(config),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    weights = {f"{name}.weight": random.standard_normal(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    weights["lm_head.weight"] *= 2.0
    sizes = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if "num_experts" in config:  # Qwen3
        sizes |= {"self_attn.q_norm": config["head_dim"], "self_attn.k_norm": config["head_dim"]}
    norms = {"model.norm": hidden} | {f"model.layers.{i}.{name}": size for i in range(layers) for name, size in sizes.items()}
    weights |= {f"{name}.weight": 1.0 + 0.3 * random.standard_normal(size) for name, size in norms.items()}
    return {name: tensor.astype(np.float32) for name, tensor in weights.items()}


def _mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    def parts(prefix: str, inner: int) -> dict[str, tuple[int, int]]:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return {f"{prefix}.{part}_proj": shape for part, shape in shapes.items()}

    hidden = config["hidden_size"]
    if "num_experts" not in config:
        return parts("mlp", config["intermediate_size"])
    shapes = {"mlp.gate": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        shapes |= parts(f"mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def _tokenizer(special: tuple[str, ...]) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*special, *alphabet))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return backend
