"""`system_fingerprint`: changes when the same request with the same seed may get another answer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton import __version__
from baton.config import ServeConfig

SMALL_BYTES = 64 * 1024 * 1024
"""Maximum size of files that count: the largest tokenizers have 35 MB. Larger files are weights, which the identity covers if
they are used."""


def system_fingerprint(config: ServeConfig, identity: bytes) -> str:
    """Digest of the program, the worker's weights and arithmetic (`identity`), the small files beside the weights (such as the
    tokenizer's) and the chat template. Paths and times are left out: two machines that serve the same have the same."""
    digest = hashlib.sha256(f"{__version__} {len(identity)} ".encode() + identity)
    path = Path(config.model)
    files = sorted(path.iterdir()) if path.is_dir() else []
    for file in [*files, *([Path(config.chat_template)] if config.chat_template else [])]:
        if file.is_file() and file.suffix != ".safetensors" and file.stat().st_size <= SMALL_BYTES:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
    return "fp_" + digest.hexdigest()[:12]
