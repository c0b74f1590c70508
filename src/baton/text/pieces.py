"""From the written form of a vocabulary entry (its "piece") to the bytes it stands for.

byte level      "Ġhi"     every character stands for one byte, by the table of GPT-2          -> b" hi"
sentencepiece   "▁hi"     text, with U+2581 for a space                                       -> b" hi"
                "<0xE4>"  byte fallback: one byte of a character the vocabulary does not have -> b"\\xe4"
added token     "<|end|>" text as it is; its characters are not looked up in any table        -> b"<|end|>"
"""

from __future__ import annotations

import re

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: bytes that print stand for themselves, the others take the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; one with a character outside the table can only be plain text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode("utf-8", "replace")


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece."""
    byte_piece = _BYTE_PIECE.fullmatch(piece)
    if byte_piece:
        return bytes([int(byte_piece[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")
