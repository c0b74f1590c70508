"""The head of a GGUF file: its counts and its metadata. The tokenizer needs no more; models/loaders/gguf_reader.py continues
with the weights.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pair ... | tensor infos | padding | tensor data
    pair   = key string | type u32 | value
    string = length u64 | UTF-8 bytes
    array  = item type u32 | count u64 | items

The `gguf` package reads the same but creates several numpy objects for each of some 10^5 strings: 3.0 s for SmolLM2's
tokenizer, against 0.1 s here. The file is not trusted: every length is checked against the rest of the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from baton.errors import ModelFileBroken, ModelUnsupported

GGUFValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
PAIRS_MAX = 65_536
_LENGTH = struct.Struct("<Q")


def map_gguf(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    """Maps the whole file, whose bytes are read on access, and returns its stat. Raises ModelFileBroken."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelFileBroken(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), os.fstat(file.fileno())
    except OSError as error:
        raise ModelFileBroken(f"{path}: cannot be read ({error.strerror})") from error


def read_gguf_metadata(path: Path) -> dict[str, GGUFValue]:
    """All metadata pairs, in file order."""
    with map_gguf(path)[0] as buffer:
        return Cursor(buffer, path).head()[1]


def leading_metadata(head: bytes, origin: str) -> dict[str, GGUFValue]:
    """The metadata pairs that are complete within the first bytes of a file."""
    path = Path(origin)
    if head[: len(MAGIC)] != MAGIC:
        raise ModelFileBroken(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
    cursor, found = Cursor(head, path), {}
    try:
        for key, value in cursor.pairs():
            found[key] = value
    except ModelFileBroken:  # the pair continues after these bytes
        pass
    return found


class Cursor:
    """Reads forward through the header, never past the end of the file."""

    def __init__(self, buffer: mmap.mmap | bytes, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.at = len(MAGIC)

    def head(self) -> tuple[int, dict[str, GGUFValue]]:
        """Number of tensors, and the metadata. Tensor infos follow."""
        tensors, pairs = self._counts()
        found: dict[str, GGUFValue] = {}
        for _ in range(pairs):
            key = self.string()
            if key in found:
                raise ModelFileBroken(f"{self.path}: the metadata key {key} is there twice; it is damaged")
            found[key] = self.value(self.scalar("<I"))
        return tensors, found

    def pairs(self) -> Iterator[tuple[str, GGUFValue]]:
        """The metadata pairs in file order."""
        for _ in range(self._counts()[1]):
            yield self.string(), self.value(self.scalar("<I"))

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and pairs."""
        version = self.scalar("<I")
        if version not in VERSIONS:
            raise ModelUnsupported(
                f"{self.path}: GGUF version {version} (or big-endian); supported are little-endian versions "
                + ", ".join(map(str, VERSIONS))
            )
        tensors, pairs = self.scalar("<Q"), self.scalar("<Q")
        if pairs > PAIRS_MAX:
            raise ModelFileBroken(f"{self.path}: claims {pairs} metadata pairs, more than {PAIRS_MAX}; it is damaged")
        return tensors, pairs

    def advance(self, nbytes: int) -> int:
        """Skips `nbytes` bytes; returns their start. Raises ModelFileBroken past the end."""
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
        try:
            return str(self.buffer[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise ModelFileBroken(f"{self.path}: the string at byte {start} is not UTF-8; it is damaged") from None

    def value(self, kind: int) -> GGUFValue:
        if kind in SCALARS:
            value: GGUFValue = self.scalar(SCALARS[kind])
            return value
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        raise ModelFileBroken(f"{self.path}: metadata of unknown type {kind} at byte {self.at}")

    def _array(self) -> GGUFValue:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in SCALARS:
            code = SCALARS[kind]
            start = self.advance(struct.calcsize(code) * count)
            return list(struct.unpack_from(f"<{count}{code[1]}", self.buffer, start))
        if kind == STRING:
            return self._strings(count)
        raise ModelUnsupported(f"{self.path}: metadata with arrays of type {kind}; supported are scalars and strings")

    def _strings(self, count: int) -> list[str]:
        """Reads a vocabulary's hundred thousand strings in place; an invalid one is left to `string`, which raises."""
        data, at, end, strings = self.buffer, self.at, len(self.buffer), []
        for _ in range(count):
            stop = at + 8 + _LENGTH.unpack_from(data, at)[0] if at + 8 <= end else end + 1
            try:
                strings.append(str(data[at + 8 : stop], "utf-8"))
            except UnicodeDecodeError:
                stop = end + 1
            if stop > end:  # truncated, or not UTF-8
                self.at = at
                self.string()
            at = stop
        self.at = at
        return strings
