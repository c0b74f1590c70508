"""Weights of a GGUF file.

For the llama architecture the format keeps the two dimensions of a rotary pair side by side (0, d/2, 1, d/2+1, ...),
and so reorders the rows of q and k when a model is converted. We turn the first half against the second, like Hugging
Face, so the rows are put back here. Quantisation works along rows: whole rows of blocks move and no number changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from baton.models.config import ModelConfig
from baton.models.config_from_gguf import ROPE_DIVISORS
from baton.models.dequantise import dequantise
from baton.models.loaders.gguf_reader import GGUFFile, GGUFTensor
from baton.models.loaders.read_ahead import ReadAhead
from baton.models.loaders.weights import StoredTensor
from baton.models.raw_tensor import Bytes, RawTensor
from baton.models.registry import architecture

OUR_TOP_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "lm_head.weight",
}
OUR_LAYER_NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROTARY_NAME = re.compile(r"layers\.\d+\.attention\.([qk])\.(weight|bias)")


def our_name(name: str) -> str:
    """Our name of a GGUF tensor; a name we do not know is returned as it is."""
    match = LAYER_NAME.fullmatch(name)
    if match and match[2] in OUR_LAYER_NAMES:
        return f"layers.{match[1]}.{OUR_LAYER_NAMES[match[2]]}.{match[3]}"
    return OUR_TOP_NAMES.get(name, name)


class GGUFWeights:
    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.origin = str(file.path)
        self._file = file
        self._ahead = ReadAhead(file.buffer)
        self._config = config
        self._interleaved = architecture(config.architecture).gguf_rotary_interleaved
        # The divisors are part of the config by now (config_from_gguf.py).
        self._tensors = {our_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_DIVISORS}

    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(tensor.type, tensor.shape, tensor.nbytes, f"{self.origin}: {tensor.name}")
            for name, tensor in self._tensors.items()
        }

    def raw(self, name: str) -> RawTensor:
        tensor = self._tensors[name]
        raw = RawTensor(tensor.type, tensor.shape, self._bytes(tensor))
        match = ROTARY_NAME.fullmatch(name) if self._interleaved else None
        if match is None:
            return raw
        heads = self._config.heads if match[1] == "q" else self._config.kv_heads
        if len(raw.shape) == 1:  # a bias: its numbers are what moves
            return RawTensor.of_floats(_halves_apart(dequantise(raw)[:, None].view(np.uint8), heads).view(np.float32)[:, 0])
        return RawTensor(raw.type, raw.shape, _halves_apart(raw.data, heads))

    def _bytes(self, tensor: GGUFTensor) -> Bytes:
        self._ahead.reach(tensor.offset, tensor.nbytes)
        data = np.frombuffer(self._file.buffer, np.uint8, tensor.nbytes, tensor.offset)
        return data.reshape(prod(tensor.shape[:-1]), -1)


def _halves_apart(rows: Bytes, heads: int) -> Bytes:
    """Rows of a head from (0, d/2, 1, d/2+1, ...) back to (0, 1, ..., d-1)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
