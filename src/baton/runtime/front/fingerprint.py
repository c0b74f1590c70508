"""`system_fingerprint`: what a client sees change when the same request with the same seed may get another answer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton import __version__
from baton.config import ServeConfig

SMALL_BYTES = 64 * 1024 * 1024
"""The largest tokenizers have 35 MB. What is larger is weights: the identity has them, where they are used at all."""


def system_fingerprint(config: ServeConfig, identity: bytes) -> str:
    """Over the program, what the worker computes on and how (`identity`), the small files beside the weights (the tokenizer's
    for one) and the chat template. Says nothing of paths or times: two machines that serve the same have the same."""
    digest = hashlib.sha256(f"{__version__} {len(identity)} ".encode() + identity)
    path = Path(config.model)
    files = sorted(path.iterdir()) if path.is_dir() else []
    for file in [*files, *([Path(config.chat_template)] if config.chat_template else [])]:
        if file.is_file() and file.suffix != ".safetensors" and file.stat().st_size <= SMALL_BYTES:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return "fp_" + digest.hexdigest()[:12]
