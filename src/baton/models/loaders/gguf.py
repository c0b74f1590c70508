"""Weights of a GGUF file under our names, in the file's layout (loaders/arranged.py rearranges them)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from baton.errors import ModelFileBroken
from baton.models.architecture import Architecture
from baton.models.config_fields import ConfigFields
from baton.models.config_from_gguf import LONG_FACTORS, ROPE_DIVISORS, SHORT_FACTORS
from baton.models.loaders.gguf_reader import GGUFFile, GGUFTensor
from baton.models.loaders.read_ahead import ReadAhead
from baton.models.loaders.weights import StoredTensor
from baton.models.raw_tensor import Bytes, RawTensor

OUR_TOP_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
    "output.weight": "lm_head.weight",
}
OUR_LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_qkv": "attention.qkv",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.all_experts.gate",
    "ffn_up_exps": "mlp.all_experts.up",
    "ffn_down_exps": "mlp.all_experts.down",
    "ffn_gate_shexp": "mlp.shared.gate",
    "ffn_up_shexp": "mlp.shared.up",
    "ffn_down_shexp": "mlp.shared.down",
    "ffn_gate_inp_shexp": "mlp.shared_gate",
    "exp_probs_b.bias": "mlp.router.correction",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
YES_NO_ROWS = "cls.output.weight"
"""Tensor in a reranker of Qwen3's kind: two rows of the output head, repeated."""
DERIVED = (ROPE_DIVISORS, LONG_FACTORS, SHORT_FACTORS, YES_NO_ROWS)
"""Names of tensors that are part of the config (config_from_gguf.py), or duplicates."""


def our_name(name: str, layer_names: Mapping[str, str] = OUR_LAYER_NAMES) -> str:
    """Our name of a GGUF tensor; an unknown name is returned unchanged."""
    match = LAYER_NAME.fullmatch(name)
    if match and f"{match[2]}.{match[3]}" in layer_names:
        return f"layers.{match[1]}.{layer_names[f'{match[2]}.{match[3]}']}"
    if match and match[2] in layer_names:
        return f"layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    return OUR_TOP_NAMES.get(name, name)


class GGUFWeights:
    def __init__(self, file: GGUFFile, model: type[Architecture], layers: int) -> None:
        """`layers`: number of the model's layers. Files of a family may have further ones behind them
        (Architecture.layers_from_gguf)."""
        self.origin = str(file.path)
        self._file = file
        self._ahead = ReadAhead(file.buffer)
        names = {**OUR_LAYER_NAMES, **model.gguf_layer_names}
        # The divisors are already part of the config (config_from_gguf.py).
        count = ConfigFields(file.metadata, self.origin, prefix=f"{file.metadata['general.architecture']}.").layer_count(
            "block_count"
        )
        behind = tuple(f"blk.{number}." for number in range(layers, count))
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name in DERIVED or name.startswith(behind):
                continue
            ours = our_name(name, names)
            if ours in self._tensors:
                raise ModelFileBroken(f"{self.origin}: {name}: also stored as {self._tensors[ours].name}")
            self._tensors[ours] = tensor

    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(tensor.type, tensor.shape, tensor.nbytes, f"{self.origin}: {tensor.name}")
            for name, tensor in self._tensors.items()
        }

    def raw(self, name: str) -> RawTensor:
        tensor = self._tensors[name]
        return RawTensor(tensor.type, tensor.shape, self._bytes(tensor))

    def _bytes(self, tensor: GGUFTensor) -> Bytes:
        self._ahead.reach(tensor.offset, tensor.nbytes)
        data = np.frombuffer(self._file.buffer, np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(prod(tensor.shape[:-1]), -1)
