"""GGUF files for tests, made from transformers models by the `gguf` package the way llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="GGUF files are made with the gguf package (pip install 'baton-serve[oracle]')")

THEIR_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{THEIR_NAMES[module]}.{kind}"


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is its row i, row 2i+1 its row i + d/2. Written out, so that no reshape can be wrong twice."""
    d = array.shape[0] // heads
    order = [head * d + i // 2 + (i % 2) * (d // 2) for head in range(heads) for i in range(d)]
    return array[order]


def write_gguf(
    path: Path,
    oracle: Any,
    architecture: str,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """`metadata` is merged over the usual keys (without the prefix); None removes a key. `kind` is for matrices."""
    config = oracle.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{architecture}.{key}", value)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 9)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in oracle.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs, array = gguf_name(name), tensor.numpy()
        if architecture == "llama" and ".attn_q." in theirs:
            array = interleaved(array, config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in theirs:
            array = interleaved(array, config.num_key_value_heads)
        if theirs in drop:
            continue
        if array.ndim == 2 and kind != "F32":
            writer.add_tensor(theirs, gguf.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(array))
    for theirs, array in (extra or {}).items():
        writer.add_tensor(theirs, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
