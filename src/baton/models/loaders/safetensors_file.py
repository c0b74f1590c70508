"""The safetensors container: a JSON table of tensors, then their bytes. Reads no tensor.

|- length of the table, 8 bytes -|- table: name -> dtype, shape, [begin, end) -|- data, without gaps -|

The file is memory-mapped; a tensor's bytes are read on access. The `safetensors` package returns torch tensors, or numpy arrays
without bfloat16; we need the bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelFileBroken
from baton.models.files import refuse_git_lfs_pointer

LENGTH = struct.Struct("<Q")
TABLE_BYTES_MAX = 100_000_000
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """The place of a tensor in the file."""

    dtype: str
    "Type of the numbers, as the file names it."
    shape: tuple[int, ...]
    offset: int
    "Offset in bytes from the start of the file."
    nbytes: int


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_git_lfs_pointer(path)
        try:
            with path.open("rb") as file:
                self.stat = os.fstat(file.fileno())
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.tensors = _tensors(self.buffer)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelFileBroken(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def _tensors(buffer: mmap.mmap) -> dict[str, SafeTensor]:
    """Tensors of the table. Raises ValueError, KeyError or TypeError for an invalid table."""
    size = len(buffer)
    _require(size >= LENGTH.size, f"it has {size} bytes")
    (length,) = LENGTH.unpack_from(buffer)
    start = LENGTH.size + length
    _require(length <= TABLE_BYTES_MAX and start <= size, f"its table should end at byte {start}, and the file has {size}")
    table = json.loads(buffer[LENGTH.size : start], object_pairs_hook=_without_doubles)
    _require(isinstance(table, dict), f"its table is a {type(table).__name__}")
    found = {name: _tensor(entry, start) for name, entry in table.items() if name != METADATA}
    end = start
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        _require(tensor.offset == end, f"{name} begins at byte {tensor.offset}, where {end} is next")
        end += tensor.nbytes
    _require(end == size, f"its tensors end at byte {end}, and the file has {size}")
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    _require(len(table) == len(pairs), "its table has a name twice")
    return table


def _tensor(entry: dict[str, Any], data_start: int) -> SafeTensor:
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    numbers = (begin, end, *shape)
    _require(all(type(number) is int and number >= 0 for number in numbers) and begin <= end, f"{entry} is no tensor")
    return SafeTensor(str(entry["dtype"]), shape, data_start + begin, end - begin)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
