"""Converts the written form of a vocabulary entry (its "piece") to its bytes.

byte level      "Ġhi"     every character stands for one byte, by the table of GPT-2          -> b" hi"
sentencepiece   "▁hi"     text, with U+2581 for a space                                       -> b" hi"
                "<0xE4>"  byte fallback: one byte of a character the vocabulary does not have -> b"\\xe4"
word piece      "hi"      the beginning of a word, which had a space or another mark before it  -> b" hi"
                "##s"     goes on with a word                                                 -> b"s"
added token     "<|end|>" text as it is; its characters are not looked up in any table        -> b"<|end|>"
"""

from __future__ import annotations

import re

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _ByteLevelAlphabet(dict[int, int]):
    """GPT-2's table for str.translate: maps a character to the one whose code point is its byte. Printable bytes map to
    themselves, the others use characters from U+0100 on."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        super().__init__({byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(others)})

    def __missing__(self, char: int) -> int:
        return 0xFFFD  # not a byte


_BYTE_LEVEL = _ByteLevelAlphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; a piece with a character outside the table is plain text."""
    try:
        return piece.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8", "replace")


def sentencepiece_bytes(piece: str) -> bytes:
    byte_piece = _BYTE_PIECE.fullmatch(piece)
    if byte_piece:
        return bytes([int(byte_piece[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def word_piece_bytes(piece: str, prefix: str) -> bytes:
    """Bytes of a WordPiece piece. Such a vocabulary does not keep the characters between two words: a space is put there."""
    text = piece.removeprefix(prefix) if piece.startswith(prefix) and piece != prefix else f" {piece}"
    return text.encode("utf-8", "replace")
