"""Splits experts of gpt-oss' Hugging Face folders: all of a layer in one tensor, gate and up in alternating rows.

floats    gate_up [experts, hidden, 2 * inner], down [experts, inner, hidden]: transposed against every other matrix
MXFP4     blocks [experts, outputs, inputs / 32, 16] and scales [experts, outputs, inputs / 32], in bytes
biases    gate_up [experts, 2 * inner], down [experts, hidden]

The result is matrices of single experts. MXFP4 is kept, in the order of a GGUF file: a block is its scale and 16 bytes, each
with a number of the first half and one of the second. (In safetensors a byte has two adjacent numbers.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from baton.errors import ModelFileBroken
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor, WeightSource
from baton.models.raw_tensor import Bytes, RawTensor
from baton.models.tensor_types import MXFP4, U8

STACKED = re.compile(r"(layers\.\d+\.mlp\.)stacked\.(gate_up|down)(_blocks|_scales|_bias|)")
ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}


class _Part(NamedTuple):
    whole: str
    expert: int
    rows: slice
    "Rows of the expert's outputs in the stacked tensor."


class StackedExperts:
    """A WeightSource that splits the stacked tensors of another."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self.origin = source.origin
        self._source, self._config = source, config
        self._parts: dict[str, _Part] = {}
        self._stored: dict[str, StoredTensor] = {}
        for name, tensor in source.stored().items():
            match = STACKED.fullmatch(name)
            if match is None:
                self._stored[name] = tensor
            else:
                self._check(tensor, match[2], match[3])
                self._add(name, tensor, match)

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._stored

    def raw(self, name: str) -> RawTensor:
        part = self._parts.get(name)
        if part is None:
            return self._source.raw(name)
        whole, shape = self._source.raw(part.whole), self._stored[name].shape
        if part.whole.endswith("_blocks"):
            scales = self._source.raw(part.whole.removesuffix("_blocks") + "_scales")
            return RawTensor(MXFP4, shape, _in_our_order(self._of_expert(whole, part), self._of_expert(scales, part)))
        if part.whole.endswith("_bias"):
            row = RawTensor(whole.type, whole.shape[1:], whole.data[part.expert : part.expert + 1])
            return RawTensor.of_floats(np.ascontiguousarray(dequantise(row)[part.rows]))
        size, inputs = whole.type.block_bytes, shape[1]
        lines = whole.data[part.expert * inputs : (part.expert + 1) * inputs].reshape(inputs, -1, size)[:, part.rows]
        return RawTensor(whole.type, shape, np.ascontiguousarray(lines.transpose(1, 0, 2)).reshape(shape[0], -1))

    def _of_expert(self, whole: RawTensor, part: _Part) -> Bytes:
        found: Bytes = whole.data.reshape(whole.shape)[part.expert, part.rows]
        return found

    def _check(self, tensor: StoredTensor, part: str, kind: str) -> None:
        experts, hidden = self._config.experts, self._config.hidden_size
        if experts is None:
            raise ModelFileBroken(f"{tensor.origin}: the config has no experts")
        outputs, inputs = (2 * experts.inner_size, hidden) if part == "gate_up" else (hidden, experts.inner_size)
        groups = inputs // MXFP4.block_elements
        wanted = {"": (inputs, outputs), "_bias": (outputs,), "_scales": (outputs, groups), "_blocks": (outputs, groups, 16)}
        if tensor.shape != (experts.count, *wanted[kind]):
            raise ModelFileBroken(
                f"{tensor.origin}: the shape is {list(tensor.shape)}, but the config asks for {[experts.count, *wanted[kind]]}"
            )
        if (tensor.type == U8) != (kind in ("_blocks", "_scales")):
            raise ModelFileBroken(f"{tensor.origin}: {tensor.type.name} is not what belongs there")
        if kind in ("_blocks", "_scales") and inputs % MXFP4.block_elements:
            raise ModelFileBroken(f"{tensor.origin}: rows of {inputs} are not whole blocks of {MXFP4.block_elements}")

    def _add(self, name: str, tensor: StoredTensor, match: re.Match[str]) -> None:
        """Registers the parts of a stacked tensor: one per expert, and for gate_up one for each half."""
        prefix, stacked, kind = match.groups()
        if kind == "_scales":
            if name.removesuffix("_scales") + "_blocks" not in self._source.stored():
                raise ModelFileBroken(f"{tensor.origin}: scales without blocks")
            return
        if kind == "_blocks" and name.removesuffix("_blocks") + "_scales" not in self._source.stored():
            raise ModelFileBroken(f"{tensor.origin}: blocks without scales")
        config, experts = self._config, self._config.experts
        assert experts is not None
        parts = ("gate", "up") if stacked == "gate_up" else ("down",)
        outputs, inputs = experts.inner_size, config.hidden_size
        if stacked == "down":
            outputs, inputs = inputs, outputs
        shape = (outputs,) if kind == "_bias" else (outputs, inputs)
        stored = MXFP4 if kind == "_blocks" else tensor.type
        nbytes = stored.row_bytes(shape[-1]) * (1 if kind == "_bias" else outputs)
        for expert in range(experts.count):
            for part in parts:
                ours = f"{prefix}experts.{expert}.{part}.{'bias' if kind == '_bias' else 'weight'}"
                if ours in self._stored:
                    raise ModelFileBroken(f"{tensor.origin}: also stored as {self._stored[ours].origin}")
                self._stored[ours] = replace(tensor, type=stored, shape=shape, nbytes=nbytes)
                self._parts[ours] = _Part(name, expert, ROWS[part])


def _in_our_order(blocks: Bytes, scales: Bytes) -> Bytes:
    """Blocks as rows in our order. blocks: [rows, groups, 16], scales: [rows, groups] -> [rows, bytes of a row]."""
    out = np.empty((*scales.shape, MXFP4.block_bytes), np.uint8)
    out[..., 0] = scales
    # Two adjacent numbers per byte: bytes 0 to 7 have the first half of the numbers, 8 to 15 the second.
    first, second = blocks[..., :8], blocks[..., 8:]
    out[..., 1::2] = first & 0x0F | second << 4
    out[..., 2::2] = first >> 4 | second & 0xF0
    return out.reshape(len(blocks), -1)
