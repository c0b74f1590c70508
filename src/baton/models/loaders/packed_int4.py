"""Matrices in 4 bits of AWQ, GPTQ and compressed-tensors folders: eight numbers per 32-bit word, a scale per group of inputs.

AWQ                 qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]; the outputs of a
                    word are in the order 0 2 4 6 1 3 5 7
GPTQ                qweight [inputs / 8, outputs], qzeros [groups, outputs / 8] (zeros less 1), scales [groups, outputs],
                    g_idx [inputs]: the group of each input
compressed-tensors  weight_packed [outputs, inputs / 8], weight_scale [outputs, groups], weight_shape, and where zeros differ
                    weight_zero_point [outputs / 8, groups]

value = scale * (q - zero). They become blocks of 32 as in GGUF files, on which the C kernels compute directly: Q4_0 where every
zero is 8, else Q4_1, whose minimum, -scale * zero, is rounded to float16: by at most 0.7 % of a scale. Where groups are not
runs of inputs (GPTQ's act-order), or no multiple of 32, or a scale is no float16, they become floats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor, WeightSource
from baton.models.packing import Packing
from baton.models.parameters import expected_shapes
from baton.models.raw_tensor import Floats, RawTensor
from baton.models.tensor_types import F16, F32, I32, I64, Q4_0, Q4_1, TensorType

Numbers = NDArray[np.uint8]

PER_WORD: Final = 8
MIDDLE: Final = 8
"""Zero of symmetric quantisation."""
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
PART = re.compile(r"(.+)\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_zero_point|weight_shape)")
CODES: Final = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}
"""Name of the part with the numbers, by quant_method."""
FURTHER: Final = {
    "awq": ("scales", "qzeros", "g_idx"),
    "gptq": ("scales", "qzeros", "g_idx"),
    "compressed-tensors": ("weight_scale", "weight_zero_point", "weight_shape"),
}
"""Names of the other parts."""


class PackedInt4:
    """A WeightSource that unpacks the matrices of another."""

    def __init__(self, source: WeightSource, config: ModelConfig, packing: Packing) -> None:
        self.origin = source.origin
        self._source, self._packing = source, packing
        self._parts: dict[str, dict[str, StoredTensor]] = {}
        self._stored: dict[str, StoredTensor] = {}
        for name, tensor in source.stored().items():
            match = PART.fullmatch(name)
            if match is None:
                self._stored[name] = tensor
            else:
                self._parts.setdefault(match[1], {})[match[2]] = tensor
        for module in self._parts:
            matrix, plain = self._as_matrix(module), self._stored.get(f"{module}.weight")
            if plain is not None:
                raise ModelFileBroken(f"{plain.origin}: also stored as {matrix.origin}")
            self._stored[f"{module}.weight"] = matrix
        self._drop_empty_biases(config)

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._stored

    def raw(self, name: str) -> RawTensor:
        module = name.removesuffix(".weight")
        if name == module or module not in self._parts:
            return self._source.raw(name)
        codes, scales, zeros, group_of = self._unpacked(module)
        kind = self._stored[name].type
        if kind == F32:
            groups = np.arange(codes.shape[1]) // self._group(codes.shape[1]) if group_of is None else group_of
            values = codes.astype(np.float32) - (np.float32(MIDDLE) if zeros is None else zeros[:, groups].astype(np.float32))
            return RawTensor.of_floats(values * scales[:, groups])
        if kind == Q4_1 and float(np.abs(scales).max()) * PER_WORD * 2 > float(np.finfo(np.float16).max):
            raise ModelUnsupported(f"{self._stored[name].origin}: minima beyond the range of float16 are not supported")
        return RawTensor(kind, codes.shape, _blocks(codes, scales, zeros, self._group(codes.shape[1]), kind))

    # Shapes

    def _as_matrix(self, module: str) -> StoredTensor:
        """The stored tensors of a 4-bit module as one matrix. Raises ModelFileBroken if parts are missing or do not fit
        together."""
        parts, method = self._parts[module], self._packing.method
        main = parts.get(CODES[method])
        if main is None or main.type != I32 or len(main.shape) != 2:
            raise ModelFileBroken(
                f"{next(iter(parts.values())).origin}: a part of a matrix in 4 bits, and its numbers are missing"
            )
        for name, part in parts.items():
            if 0 in part.shape or name not in (CODES[method], *FURTHER[method]):
                raise ModelFileBroken(f"{part.origin}: {list(part.shape)} is no part of a matrix in 4 bits of {method}")
        rows, columns = main.shape
        outputs, inputs = (rows, columns * PER_WORD) if method == "compressed-tensors" else (columns, rows * PER_WORD)
        if method == "awq":
            outputs, inputs = columns * PER_WORD, rows
        self._check(module, outputs, inputs)
        self._check_stated_shape(module, (outputs, inputs))
        kind = self._kind(module, inputs)
        nbytes = sum(part.nbytes for part in parts.values())
        return StoredTensor(kind, (outputs, inputs), nbytes, main.origin)

    def _check(self, module: str, outputs: int, inputs: int) -> None:
        """Checks the sizes of all parts, which follow from those of the matrix."""
        parts, size = self._parts[module], self._group(inputs)
        if inputs % size:
            raise ModelFileBroken(f"{module}: {inputs} inputs are no whole groups of {size}")
        groups = inputs // size
        wanted = {
            "scales": (groups, outputs),
            "qzeros": (groups, outputs // PER_WORD),
            "g_idx": (inputs,),
            "weight_scale": (outputs, groups),
            "weight_zero_point": (outputs // PER_WORD, groups),
            "weight_shape": (2,),
        }
        needed = ["scales", "qzeros"]
        if self._packing.method == "compressed-tensors":
            needed = ["weight_scale"] if self._packing.symmetric else ["weight_scale", "weight_zero_point"]
        for name in needed:
            if name not in parts:
                raise ModelFileBroken(f"{parts[CODES[self._packing.method]].origin}: {name} of this matrix is missing")
        for name, part in parts.items():
            if name in wanted and part.shape != wanted[name]:
                raise ModelFileBroken(
                    f"{part.origin}: the shape is {list(part.shape)}, and its matrix asks for {list(wanted[name])}"
                )

    def _check_stated_shape(self, module: str, shape: tuple[int, int]) -> None:
        part = self._parts[module].get("weight_shape")
        if part is None:
            return
        raw = self._source.raw(f"{module}.weight_shape")
        stated = np.ascontiguousarray(raw.data).view(np.int64).reshape(-1).tolist() if raw.type == I64 else raw.type.name
        if stated != list(shape):
            raise ModelFileBroken(f"{part.origin}: it is {stated}, and the numbers are of a matrix {list(shape)}")

    def _kind(self, module: str, inputs: int) -> TensorType:
        if self._group(inputs) % Q4_0.block_elements or self._groups_of(module, inputs) is not None:
            return F32
        if not self._has_float16_scales(module):
            return F32
        zeros = self._zeros(module)
        return Q4_0 if zeros is None or bool((zeros == MIDDLE).all()) else Q4_1

    def _has_float16_scales(self, module: str) -> bool:
        """Whether blocks of 32 have their scale in float16."""
        name = FURTHER[self._packing.method][0]
        if self._parts[module][name].type == F16:
            return True
        scales = dequantise(self._source.raw(f"{module}.{name}"))
        with np.errstate(over="ignore"):
            return np.array_equal(scales.astype(np.float16), scales)

    def _group(self, inputs: int) -> int:
        return inputs if self._packing.group == -1 else self._packing.group

    def _drop_empty_biases(self, config: ModelConfig) -> None:
        """Drops biases of zeros, which older GPTQ folders have beside every matrix."""
        expected = expected_shapes(config)
        for module in self._parts:
            name, outputs = f"{module}.bias", self._stored[f"{module}.weight"].shape[0]
            bias = self._stored.get(name)
            if bias is None or name in expected or bias.shape != (outputs,):
                continue
            if not dequantise(self._source.raw(name)).any():
                del self._stored[name]

    # Numbers

    def _unpacked(self, module: str) -> tuple[Numbers, Floats, Numbers | None, NDArray[np.int64] | None]:
        """Codes [outputs, inputs], scales and zeros [outputs, groups], and the group of each input if groups are no runs."""
        method, parts = self._packing.method, self._parts[module]
        words = self._words(f"{module}.{CODES[method]}")
        if method == "compressed-tensors":
            codes = _numbers(words)
        elif method == "awq":
            codes = _numbers(words, AWQ_ORDER).T
        else:
            codes = _numbers(words.T)
        scales = dequantise(self._source.raw(f"{module}.{'weight_scale' if 'weight_scale' in parts else 'scales'}"))
        scales = scales if method == "compressed-tensors" else scales.T
        return (
            np.ascontiguousarray(codes),
            np.ascontiguousarray(scales),
            self._zeros(module),
            self._groups_of(module, codes.shape[1]),
        )

    def _zeros(self, module: str) -> Numbers | None:
        """Zeros [outputs, groups]. None: all are MIDDLE."""
        parts = self._parts[module]
        if self._packing.method == "compressed-tensors":
            if "weight_zero_point" not in parts:
                return None
            return np.ascontiguousarray(_numbers(self._words(f"{module}.weight_zero_point").T).T)
        zeros = _numbers(self._words(f"{module}.qzeros"), AWQ_ORDER if self._packing.method == "awq" else None)
        return np.ascontiguousarray((zeros + np.uint8(self._packing.less_one)).T)

    def _groups_of(self, module: str, inputs: int) -> NDArray[np.int64] | None:
        """The group of each input. None: groups are runs of inputs."""
        if "g_idx" not in self._parts[module]:
            return None
        found = self._words(f"{module}.g_idx").reshape(-1).astype(np.int64)
        size = self._group(inputs)
        if not bool(((found >= 0) & (found < inputs // size)).all()):
            raise ModelFileBroken(f"{self._parts[module]['g_idx'].origin}: it names groups that are not there")
        return None if np.array_equal(found, np.arange(inputs) // size) else found

    def _words(self, name: str) -> NDArray[np.uint32]:
        raw = self._source.raw(name)
        if raw.type != I32:
            raise ModelFileBroken(f"{self.origin}: {name} is in {raw.type.name}, and not in 32-bit words")
        return np.ascontiguousarray(raw.data).view(np.uint32).reshape(raw.shape)


def _numbers(words: NDArray[np.uint32], order: tuple[int, ...] | None = None) -> Numbers:
    """Numbers of packed words, [rows, words] -> [rows, 8 * words]. `order`: place in its eight of each number of a word, lowest
    bits first."""
    out = np.empty((*words.shape, PER_WORD), np.uint8)
    for at in range(PER_WORD):
        out[..., at if order is None else order[at]] = (words >> np.uint32(4 * at)) & np.uint32(15)
    return out.reshape(len(words), -1)


def _blocks(codes: Numbers, scales: Floats, zeros: Numbers | None, group: int, kind: TensorType) -> NDArray[np.uint8]:
    """Rows of Q4_0 or Q4_1: each group's scale is repeated for its blocks of 32."""
    rows, width = codes.shape
    per_group, half = group // kind.block_elements, kind.block_elements // 2
    count = width // kind.block_elements
    out = np.empty((rows, count, kind.block_bytes), np.uint8)
    out[..., 0:2] = np.repeat(scales.astype(np.float16), per_group, 1)[..., None].view(np.uint8)
    if kind == Q4_1:
        assert zeros is not None
        minima = (-scales * zeros.astype(np.float32)).astype(np.float16)
        out[..., 2:4] = np.repeat(minima, per_group, 1)[..., None].view(np.uint8)
    cells = codes.reshape(rows, count, 2, half)
    out[..., kind.block_bytes - half :] = cells[:, :, 0] | cells[:, :, 1] << 4
    return out.reshape(rows, -1)
