"""The GGUF container: header, metadata, and where each tensor lies. Reads no tensor.

|- magic, version, counts -|- metadata: key, type, value -|- tensors: name, shape, type, offset -|- pad -|- data -|

The file is memory-mapped; a tensor's bytes are read by whoever touches them. The `gguf` package could parse this too,
but makes an array object of every token of the vocabulary: 3.3 s for the SmolLM2 file, against 0.1 s here.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.files import refuse_git_lfs_pointer
from baton.models.tensor_types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32
DIMENSIONS_MAX = 4

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    "Slowest dimension first, as everywhere else in Python; the file has them the other way round."
    type: TensorType
    offset: int
    "From the start of the file."
    nbytes: int


class GGUFFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_git_lfs_pointer(path)
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ModelFileBroken(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
            self.stat = os.fstat(file.fileno())
            self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_header(_Cursor(self.buffer, path, at=len(MAGIC)))

    def floats(self, name: str) -> tuple[float, ...]:
        """A small float32 tensor, as plain numbers."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise ModelUnsupported(f"{self.path}: {name} is of type {tensor.type.name}; supported here is F32")
        return struct.unpack_from(f"<{tensor.nbytes // 4}f", self.buffer, tensor.offset)

    def _read_header(self, cursor: _Cursor) -> None:
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise ModelUnsupported(
                f"{self.path}: GGUF version {version} (or big-endian); supported are little-endian versions "
                + ", ".join(map(str, VERSIONS))
            )
        tensor_count, metadata_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(metadata_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        infos = [self._tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileBroken(f"{self.path}: general.alignment is {alignment!r}; it must be a positive number")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add_tensor(name, shape, kind, data_start + offset)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
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


class _Cursor:
    """Reads forward through the header, and never past the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path, at: int) -> None:
        self.buffer = buffer
        self.path = path
        self.at = at

    def advance(self, nbytes: int) -> int:
        """Step over so many bytes; returns where they begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.buffer):
            raise ModelFileBroken(
                f"{self.path}: truncated within the header; byte {self.at} is needed, but the file has "
                f"{len(self.buffer)}. Fetch it again"
            )
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.buffer, self.advance(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.advance(length)
        # Vocabularies may hold bytes that are no text by themselves.
        return self.buffer[start : self.at].decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        raise ModelFileBroken(f"{self.path}: metadata of unknown type {kind} at byte {self.at}")

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in SCALARS:
            code = SCALARS[kind]
            start = self.advance(struct.calcsize(code) * count)
            return list(struct.unpack_from(f"<{count}{code[1]}", self.buffer, start))
        if kind == STRING:
            return [self.string() for _ in range(count)]
        raise ModelUnsupported(f"{self.path}: metadata with arrays of type {kind}; supported are scalars and strings")
