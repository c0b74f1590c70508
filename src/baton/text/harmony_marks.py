"""Special tokens of gpt-oss' "harmony" format, which parsers/harmony.py reads."""

from __future__ import annotations

from typing import Final

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

ENDS: Final = (END, RETURN, CALL)
"""Marks that end a message."""
