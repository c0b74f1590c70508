"""`system_fingerprint`: what a client sees change when the same request with the same seed may get another answer."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from baton import __version__
from baton.config import ServeConfig

SAMPLE_BYTES = 64 * 1024
"""Read from both ends of a file. A file of weights is too large to be read twice; training changes every part of it."""


def system_fingerprint(config: ServeConfig) -> str:
    """Over the program, the model's files, the chat template and how numbers are kept. Says nothing of paths or times, so
    that two machines that serve the same have the same."""
    digest = hashlib.sha256(repr((__version__, platform.machine(), *_numbers(config))).encode())
    path = Path(config.model)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in [*files, *([Path(config.chat_template)] if config.chat_template else [])]:
        if file.is_file():
            digest.update(_sample(file))
    return "fp_" + digest.hexdigest()[:12]


def _numbers(config: ServeConfig) -> tuple[str, ...]:
    return (config.dtype, config.quantization, config.kv_dtype, config.compute)


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(repr((file.name, size)).encode())
    with file.open("rb") as content:
        digest.update(content.read(SAMPLE_BYTES))
        content.seek(max(0, size - SAMPLE_BYTES))
        digest.update(content.read(SAMPLE_BYTES))
    return digest.digest()
