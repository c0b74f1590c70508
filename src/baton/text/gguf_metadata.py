"""Reads the key-value part at the front of a GGUF file, and nothing else.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pair ... | tensor infos | tensor data
    pair   = key string | type u32 | value
    string = length u64 | UTF-8 bytes
    array  = item type u32 | count u64 | items

The `gguf` package reads the same but makes several numpy objects for each of some 10^5 strings: 3.0 s for SmolLM2's
tokenizer, against 0.1 s here. The file is not trusted: every length is checked against what is left of the file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TypeAlias

from baton.errors import InvalidConfig

GGUFValue: TypeAlias = "int | float | bool | str | list[int] | list[float] | list[bool] | list[str]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PAIRS_MAX = 65_536
_LENGTH = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, GGUFValue]:
    """All pairs of the file, in its order. Raises InvalidConfig where the file is not a GGUF we can read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).pairs()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise InvalidConfig(f"{path.name}: cannot be read as a GGUF file ({error})") from error


class _Reader:
    """A cursor over the file that never steps past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._name = path.name
        self._data = data
        self._at = 0

    def pairs(self) -> dict[str, GGUFValue]:
        if self._bytes(4) != _MAGIC:
            raise InvalidConfig(f"{self._name} is not a GGUF file: it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise InvalidConfig(
                f"{self._name}: GGUF version {version} is not supported (versions {_VERSIONS}, little-endian, are)"
            )
        self._number("Q")  # number of tensors
        count = self._number("Q")
        if count > _PAIRS_MAX:
            raise InvalidConfig(f"{self._name}: claims {count} metadata pairs, more than {_PAIRS_MAX}; is it damaged?")
        return {self._string(): self._value() for _ in range(int(count))}

    def _value(self) -> GGUFValue:
        kind = int(self._number("I"))
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._format_of(kind))

    def _array(self) -> GGUFValue:
        kind = int(self._number("I"))
        count = int(self._number("Q"))
        if kind == _STRING:
            return self._strings(count)
        code = self._format_of(kind)
        size = struct.calcsize("<" + code)
        self._require(size * count)
        items = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size * count
        return list(items)

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has a hundred thousand of them: good ones are read in place, an odd one is left to `_string`."""
        data, at, end, strings = self._data, self._at, len(self._data), []
        for _ in range(count):
            stop = at + 8 + _LENGTH.unpack_from(data, at)[0] if at + 8 <= end else end + 1
            try:
                strings.append(str(data[at + 8 : stop], "utf-8"))
            except UnicodeDecodeError:
                stop = end + 1
            if stop > end:  # cut short, or not UTF-8
                self._at = at
                self._string()
            at = stop
        self._at = at
        return strings

    def _format_of(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise InvalidConfig(f"{self._name}: the metadata type {kind} at byte {self._at} is not supported here")
        return code

    def _string(self) -> str:
        start = self._at
        raw = self._bytes(int(self._number("Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidConfig(f"{self._name}: the string at byte {start} is not UTF-8; is it damaged?") from None

    def _number(self, code: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        value: int | float | bool = struct.unpack("<" + code, self._bytes(size))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        self._require(count)
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def _require(self, count: int) -> None:
        left = len(self._data) - self._at
        if count > left:
            raise InvalidConfig(
                f"{self._name}: {count} bytes wanted at byte {self._at} and {left} are left; is the file cut short?"
            )
