"""Precompiled kernels in a wheel for one CPU architecture (tools/wheel.py). A file's name identifies its sources and its
content, as in native/build_cache.py:

    baton-VARIANT-FINGERPRINT-CONTENT.so     FINGERPRINT: of sources, flags, machine    CONTENT: of the file's own bytes

The compiler is not part of the fingerprint: all compilers give the same results (tests/native/test_prebuilt.py). A file of
other sources, or a damaged one, is never loaded; then the kernels are compiled here.
"""

from __future__ import annotations

import logging
import platform
from hashlib import sha256
from pathlib import Path

from baton.native import build
from baton.native.variants import Variant

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("prebuilt")
DIGITS = 20


def find(variant: Variant) -> Path | None:
    """The prebuilt library of this variant, if this installation has a complete one of these sources."""
    for path in sorted(FOLDER.glob(f"{stem(variant)}-*.so")):
        if path.name == file_name(variant, path):
            return path
        log.warning("the prebuilt %s kernels are damaged: install Baton again (%s)", variant.name, path)
    return None


def file_name(variant: Variant, made: Path, machine: str | None = None) -> str:
    return f"{stem(variant, machine)}-{sha256(made.read_bytes()).hexdigest()[:DIGITS]}.so"


def stem(variant: Variant, machine: str | None = None) -> str:
    how = " ".join([*build.FLAGS, *variant.compiler_flags, machine or platform.machine()])
    parts = [file.read_bytes() for file in sorted(build.SOURCES.iterdir())]
    return f"baton-{variant.name}-{sha256(b'|'.join([*parts, how.encode()])).hexdigest()[:DIGITS]}"
