"""A model's parameters as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.config import Quantization
from baton.models.dequantise import dequantise, dequantise_into
from baton.models.loaders.weights import RawWeights
from baton.models.quantise import BLOCK_TYPES, weights_as
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import BF16, F8_E4M3, F16, F32, F64, MXFP4

PLAIN_TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, F64: torch.float64}


class Weights:
    def __init__(
        self,
        raw: RawWeights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantization: Quantization = "none",
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.quantization = quantization
        self._raw = raw

    def take(self, names: Sequence[str]) -> Tensor:
        """The parameters of these names, stacked along their first dimension."""
        return self.stacked([self.take_raw(name) for name in names])

    def take_raw(self, name: str) -> RawTensor:
        """A parameter in its compute type: in blocks only if the product is quantised."""
        raw = self._raw.take(name)
        # fp8 is unpacked directly into its destination: floats of all experts of a layer would take gigabytes more.
        stays = self.quantization == "none" and (raw.type in PLAIN_TYPES or raw.type == F8_E4M3)
        return raw if stays else weights_as(raw, name, self.quantization)

    def take_mxfp4(self, names: Sequence[str]) -> Tensor | None:
        """The stored bytes of these matrices, uint8 [rows, bytes of a row]. None: not all of them are in MXFP4."""
        if any(self._raw.stored[name].type != MXFP4 for name in names):
            return None
        return self.bytes_of([self._raw.take(name) for name in names])

    def bytes_of(self, parts: Sequence[RawTensor]) -> Tensor:
        return torch.from_numpy(np.concatenate([raw.data for raw in parts])).to(self.device)

    def stacked(self, parts: Sequence[RawTensor]) -> Tensor:
        """The values of these parameters, stacked, whatever their stored type."""
        rows = [raw.shape[0] for raw in parts]
        out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        for raw, place in zip(parts, torch.split(out, rows), strict=True):
            _fill(place, raw)
        return out


def is_quantised(raw: RawTensor) -> bool:
    return raw.type in BLOCK_TYPES


def _fill(out: Tensor, raw: RawTensor) -> None:
    if out.device.type == "cpu" and PLAIN_TYPES.get(raw.type) == out.dtype:
        out.view(torch.uint8).numpy().reshape(-1)[:] = raw.data.reshape(-1)
    elif out.device.type == "cpu" and out.dtype == torch.float32:
        dequantise_into(raw, out.numpy())
    else:
        out.copy_(torch.from_numpy(dequantise(raw)))
