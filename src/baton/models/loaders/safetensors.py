"""Weights of a Hugging Face folder: model.safetensors, or shards with an index. Pickle files are never opened.

An fp8 matrix has its scales in a separate tensor, NAME.weight_scale_inv: a factor per block. Outside of this module the scales
are part of the matrix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from baton.errors import ModelFileBroken, ModelNotFound, ModelUnsupported
from baton.models.dequantise import dequantise
from baton.models.files import is_pickle
from baton.models.loaders.safetensors_file import SafetensorsFile
from baton.models.loaders.weights import StoredTensor
from baton.models.raw_tensor import RawTensor, scales_shape
from baton.models.tensor_types import BF16, F8_E4M3, F16, F32, F64, I32, I64, SCALE_BLOCK, U8

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TYPES = {kind.name: kind for kind in (F64, F32, F16, BF16, F8_E4M3, U8, I32, I64)}
PARTS = {
    U8.name: ("_blocks", "_scales"),
    I32.name: (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_zero_point"),
    I64.name: (".weight_shape",),
}
"""Suffixes of tensors that may consist of whole numbers: parts of MXFP4, and of matrices in 4 bits."""
SUPPORTED = ", ".join(name for name in TYPES if name not in PARTS)

OUR_TOP_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "final_norm.weight",
    "model.norm.bias": "final_norm.bias",
    "lm_head.weight": "lm_head.weight",
}
OUR_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.qkv_proj": "attention.qkv",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate": "mlp.router",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.gate_up_proj": "mlp.gate_up",
    "mlp.down_proj": "mlp.down",
}
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(\w+)")

# Old Llama files store the rotary frequencies, which follow from the config.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
SCALES_SUFFIX = "_scale_inv"


def our_name(name: str, layer_names: Mapping[str, str] = OUR_LAYER_NAMES) -> str:
    """Our name of a Hugging Face parameter; an unknown name is returned unchanged."""
    match = LAYER_NAME.fullmatch(name)
    if match is None:
        return layer_names.get(name) or OUR_TOP_NAMES.get(name, name)
    layer, module, kind = match.groups()
    if f"{module}.{kind}" in layer_names:
        return f"layers.{layer}.{layer_names[f'{module}.{kind}']}"
    if module in layer_names:
        return f"layers.{layer}.{layer_names[module]}.{kind}"
    expert = EXPERT_NAME.fullmatch(module)
    return name if expert is None else f"layers.{layer}.mlp.experts.{expert[1]}.{EXPERT_PARTS[expert[2]]}.{kind}"


class SafetensorsWeights:
    """Weights of a folder. The files stay memory-mapped as long as this object or one of its tensors lives."""

    def __init__(self, folder: Path, rename: Callable[[str], str]) -> None:
        """`rename`: our name of a tensor, its own where we have none, empty where the model does without the tensor."""
        self.origin = str(folder)
        self._rename = rename
        self.left_out: set[str] = set()
        "Names of tensors that the model does without."
        self._stored: dict[str, StoredTensor] = {}
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        self.files = tuple(SafetensorsFile(path) for path in _files(folder))
        for file in self.files:
            self._add(file)
        self._scales = self._take_scales()
        _check_index(folder, {theirs for _, theirs in (*self._places.values(), *self._scales.values())} | self.left_out)

    def _add(self, file: SafetensorsFile) -> None:
        for theirs, tensor in sorted(file.tensors.items()):
            ours = "" if theirs.endswith(DERIVED_SUFFIX) else self._rename(theirs)
            if not ours:
                self.left_out.add(theirs)
                continue
            origin = f"{file.path}: {theirs}"
            if tensor.dtype not in TYPES or (tensor.dtype in PARTS and not theirs.endswith(PARTS[tensor.dtype])):
                raise ModelUnsupported(f"{origin}: type {tensor.dtype} is not supported; supported are {SUPPORTED}")
            if tensor.nbytes != TYPES[tensor.dtype].row_bytes(prod(tensor.shape)):
                raise ModelFileBroken(f"{origin}: {tensor.nbytes} bytes cannot be {list(tensor.shape)} of {tensor.dtype}")
            if ours in self._stored:
                raise ModelFileBroken(f"{origin}: also stored as {self._stored[ours].origin}")
            self._stored[ours] = StoredTensor(TYPES[tensor.dtype], tensor.shape, tensor.nbytes, origin)
            self._places[ours] = (file, theirs)

    def _take_scales(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Removes the scales of fp8 matrices from the parameters, and returns them by the matrix's name."""
        found = {}
        for name, stored in list(self._stored.items()):
            if not name.endswith(f".weight{SCALES_SUFFIX}"):
                continue
            place, origin = self._places.pop(name), self._stored.pop(name).origin
            matrix = self._stored.get(our_name(name.removesuffix(SCALES_SUFFIX)))
            if matrix is None or matrix.type != F8_E4M3 or len(matrix.shape) != 2 or stored.type == F8_E4M3:
                raise ModelFileBroken(f"{origin}: these scales belong to no matrix in fp8")
            if stored.shape != scales_shape(matrix.shape):
                raise ModelFileBroken(
                    f"{origin}: the scales are {list(stored.shape)}; a matrix of {list(matrix.shape)} in blocks of "
                    f"{SCALE_BLOCK} x {SCALE_BLOCK} has {list(scales_shape(matrix.shape))}"
                )
            found[our_name(name.removesuffix(SCALES_SUFFIX))] = place
        for name, stored in self._stored.items():
            if stored.type == F8_E4M3 and name not in found:
                raise ModelFileBroken(f"{stored.origin}: fp8 without scales ({SCALES_SUFFIX})")
        return found

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._stored

    def raw(self, name: str) -> RawTensor:
        raw = _raw(*self._places[name])
        scales = self._scales.get(name)
        return raw if scales is None else replace(raw, scales=dequantise(_raw(*scales)))


def _raw(file: SafetensorsFile, name: str) -> RawTensor:
    tensor = file.tensors[name]
    data = np.frombuffer(file.buffer, np.uint8, tensor.nbytes, tensor.offset)
    return RawTensor(TYPES[tensor.dtype], tensor.shape, data.reshape(prod(tensor.shape[:-1]), -1))


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises if there are none, or the index names files that are not plain files of the
    folder."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if is_pickle(path))
        if pickles:
            raise ModelUnsupported(
                f"{folder}: the weights are pickle files ({', '.join(pickles)}), which can run any code when opened; "
                "convert them to safetensors"
            )
        raise ModelNotFound(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    paths = []
    for name in sorted(set(_weight_map(folder).values())):
        if Path(name).name != name:
            raise ModelFileBroken(f"{folder / INDEX}: {name!r} is not a plain file name in the same folder")
        if not (folder / name).is_file():
            raise ModelFileBroken(f"{folder / INDEX}: the shard {name} is not in the folder; fetch it again")
        paths.append(folder / name)
    return paths


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileBroken(f"{folder / INDEX}: not a readable index with a weight_map ({error!r})") from error


def _check_index(folder: Path, found: set[str]) -> None:
    """Every tensor of the index must be in a shard; otherwise shards and index are of different downloads. Raises
    ModelFileBroken."""
    if (folder / SINGLE).is_file():
        return
    promised = [name for name in _weight_map(folder) if not name.endswith(DERIVED_SUFFIX)]
    lost = [name for name in promised if name not in found]
    if lost:
        raise ModelFileBroken(f"{folder / INDEX}: {len(lost)} tensors are in no shard, the first is {lost[0]}")
