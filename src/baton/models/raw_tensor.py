"""A parameter as stored: bytes and their type. The output of every loader, and the input of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.models.tensor_types import F32, SCALE_BLOCK, TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an fp8 matrix."""
    return tuple(-(-extent // SCALE_BLOCK) for extent in shape)


class TensorFacts(Protocol):
    """Type and shape of a parameter, without its bytes."""

    @property
    def type(self) -> TensorType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def row_elements(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RawTensor:
    type: TensorType
    shape: tuple[int, ...]
    "Shape of the values. The last dimension is a row: a vector is one row."
    data: Bytes
    "Bytes, [rows, bytes of a row]. Often a view of the mapped file: must not be written to, and may be unaligned."
    scales: Floats | None = None
    "Scales of an fp8 matrix: the factor of each SCALE_BLOCK x SCALE_BLOCK block; the last ones may be smaller."

    def __post_init__(self) -> None:
        if self.data.shape != (self.rows, self.type.row_bytes(self.row_elements)):
            raise ValueError(f"{self.type.name} of shape {self.shape} is not {self.data.shape} bytes")
        if self.scales is not None and self.scales.shape != scales_shape(self.shape):
            raise ValueError(f"scales of shape {self.scales.shape} do not belong to a matrix of shape {self.shape}")

    @classmethod
    def of_floats(cls, values: Floats) -> RawTensor:
        """A tensor of these floats. The array is copied only if it is not dense."""
        rows, width = prod(values.shape[:-1]), values.shape[-1]
        return cls(F32, values.shape, np.ascontiguousarray(values, np.float32).reshape(rows, width).view(np.uint8))

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_elements(self) -> int:
        return self.shape[-1] if self.shape else 1
