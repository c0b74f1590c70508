"""An open GGUF file: metadata (baton/gguf.py), and the place of each tensor. Reads no tensor.

|- magic, version, counts -|- metadata: key, type, value -|- tensors: name, shape, type, offset -|- pad -|- data -|

The file is memory-mapped; a tensor's bytes are read on access.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.gguf import Cursor, map_gguf
from baton.models.files import refuse_git_lfs_pointer
from baton.models.tensor_types import TENSOR_TYPES, TensorType

ALIGNMENT_DEFAULT = 32
DIMENSIONS_MAX = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The place of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    "Shape, slowest dimension first, as in Python; the file has the reverse order."
    type: TensorType
    offset: int
    "Offset in bytes from the start of the file."
    nbytes: int


class GGUFFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_git_lfs_pointer(path)
        self.buffer, self.stat = map_gguf(path)
        self.tensors: dict[str, GGUFTensor] = {}
        cursor = Cursor(self.buffer, path)
        tensor_count, self.metadata = cursor.head()
        self._read_tensors(cursor, tensor_count)

    def floats(self, name: str) -> tuple[float, ...]:
        """A small float32 tensor, as plain numbers."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise ModelUnsupported(f"{self.path}: {name} is of type {tensor.type.name}; supported here is F32")
        return struct.unpack_from(f"<{tensor.nbytes // 4}f", self.buffer, tensor.offset)

    def _read_tensors(self, cursor: Cursor, tensor_count: int) -> None:
        infos = [self._tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileBroken(f"{self.path}: general.alignment is {alignment!r}; it must be a positive number")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add_tensor(name, shape, kind, data_start + offset)
        self._refuse_overlaps()

    def _refuse_overlaps(self) -> None:
        placed = sorted((one for one in self.tensors.values() if one.nbytes), key=lambda one: one.offset)
        for one, following in pairwise(placed):
            if one.offset + one.nbytes > following.offset:
                raise ModelFileBroken(f"{self.path}: the tensors {one.name} and {following.name} overlap; it is damaged")

    def _tensor_info(self, cursor: Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = cursor.string()
        dimensions = cursor.scalar("<I")
        if dimensions > DIMENSIONS_MAX:
            raise ModelFileBroken(f"{self.path}: {name} has {dimensions} dimensions; {DIMENSIONS_MAX} is the most")
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
        number = cursor.scalar("<I")
        if number not in TENSOR_TYPES:
            raise ModelUnsupported(
                f"{self.path}: {name} is of GGUF type number {number}; supported are "
                + ", ".join(kind.name for kind in TENSOR_TYPES.values())
            )
        return name, shape, TENSOR_TYPES[number], cursor.scalar("<Q")

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: TensorType, offset: int) -> None:
        if name in self.tensors:
            raise ModelFileBroken(f"{self.path}: the tensor {name} is there twice")
        width = shape[-1] if shape else 1
        if width % kind.block_elements:
            raise ModelFileBroken(
                f"{self.path}: rows of {name} hold {width} elements, not a multiple of {kind.name}'s {kind.block_elements}"
            )
        blocks = width // kind.block_elements
        for extent in shape[:-1]:
            blocks *= extent
        nbytes = blocks * kind.block_bytes
        if offset + nbytes > len(self.buffer):
            raise ModelFileBroken(
                f"{self.path}: truncated; {name} ends at byte {offset + nbytes}, but the file has {len(self.buffer)}. "
                "Fetch it again"
            )
        self.tensors[name] = GGUFTensor(name, shape, kind, offset, nbytes)
