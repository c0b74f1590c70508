"""The layout of a KV block.

                 | layer 0                 | layer 1                 | ...
                 /                          \\
                | keys                       | values                     |
                | [kv_heads][head_dim][size] | [kv_heads][size][head_dim] |

A block holds `size` tokens of every layer and is one run of bytes: to move it to another tier or another instance is one
copy. Keys are transposed (head_dim outside, token inside): attention then computes the scores of neighbouring tokens in
the lanes of one vector, in place. Values are not, for the same reason: there the output's dimensions are the lanes.

That is the format "turned". Other formats fit their kernels: the same numbers of the same dtype in another order.

int8-fours    in fours, followed per head by the scales of its tokens; keys are rotated (native/csrc/attention_int8.h)
token-major   keys like values, one token after the other: a GPU reads them in runs (worker/cuda/)
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from baton.errors import ProtocolError

VERSION = "batonKV2"
"""Version of the order within a block. Blocks of another version are never read."""

KVDtype = Literal["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"]
KVFormat = Literal["turned", "int8-fours", "token-major"]
NUMPY_TYPES: dict[KVDtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has none: its arrays show the bits
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(np.uint8),  # also without a numpy type
}
ORDERS: dict[KVFormat, str] = {
    "turned": "k(head,dim,token) v(head,token,dim)",
    "int8-fours": "k(head,rotated dim/4,token,4; scales) v(head,token/4,dim,4; scales)",
    "token-major": "k(head,token,dim) v(head,token,dim)",
}
"""Order of a block's numbers in a layer."""
SCALE_BYTES = 4
"""Bytes of the float32 that scales a head's numbers of one token, with int8."""


class KVKind(NamedTuple):
    """Data type and format of a pool, whatever its shape."""

    dtype: KVDtype
    format: KVFormat = "turned"


INT8_FOURS = KVKind("int8", "int8-fours")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """The layout of a block. Two pools with the same fingerprint can exchange blocks."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    "Tokens per block."
    dtype: KVDtype
    format: KVFormat = "turned"

    @property
    def kind(self) -> KVKind:
        return KVKind(self.dtype, self.format)

    @property
    def itemsize(self) -> int:
        return NUMPY_TYPES[self.dtype].itemsize

    @property
    def half(self) -> int:
        """Numbers in the keys of one block of one layer, and in its values. Scales count as the bytes they take."""
        scale = SCALE_BYTES if self.format == "int8-fours" else 0
        return self.kv_heads * (self.head_dim + scale) * self.block_size

    @property
    def block_numbers(self) -> int:
        return self.layers * 2 * self.half

    @property
    def block_bytes(self) -> int:
        return self.block_numbers * self.itemsize

    def fingerprint(self) -> bytes:
        words = (self.layers, self.kv_heads, self.head_dim, self.block_size, self.dtype)
        return sha256(f"{VERSION} block layer {ORDERS[self.format]} {words}".encode()).digest()

    def encode(self) -> bytes:
        """Encoded form, for processes that forward it unread."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> KVLayout:
        try:
            return msgspec.json.decode(content, type=cls)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"this is no layout of KV blocks: {error}") from None
