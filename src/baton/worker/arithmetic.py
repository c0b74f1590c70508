"""Which arithmetic a worker computes with: a number for each way to compute, as part of the identity (worker/identity.py).

Two workers whose arithmetic has the same name give the same bits for the same tokens, so one goes on with the keys and values
of the other. The name therefore changes exactly when bits do. A digest of the sources would change with every comment, and
make everything that is stored useless.

Whoever changes the bits of a way to compute raises its number. For the kernels in C a test holds this: it compares digests of
a small model's logits with those that were written down for the number (tests/native/test_golden.py). A variant's number is
its own: the others keep theirs.
"""

from __future__ import annotations

import platform

from baton.native.variants import Variant

NATIVE: dict[str, int] = {
    "x86_64 amx": 1,
    "x86_64 avx512": 2,
    "x86_64 avxvnni": 2,
    "x86_64 avx2": 2,
    "x86_64 plain": 2,
    "aarch64 i8mm": 2,
    "aarch64 dotprod": 2,
    "aarch64 plain": 2,
}
"""Of native/: csrc, and what prepares weights and angles for it (native/packing.py, native/balance.py, models/rotary.py)."""
NATIVE_ELSEWHERE = 1
"""Of plain C on a machine that nobody here has."""
TORCH = 2
"""Of models/decoder.py and its layers."""
CUDA = 1
"""Of the kernels in worker/cuda/, and of what prepares weights and angles for them. Held by tests/gpu/test_golden_on_gpu.py."""


def native_arithmetic(variant: Variant, machine: str | None = None) -> str:
    key = native_key(variant, machine)
    return f"native {key} {NATIVE.get(key, NATIVE_ELSEWHERE)}"


def cuda_arithmetic(gpu: str, libraries: str, *, fp8: bool, deterministic: bool) -> str:
    """`libraries`: which versions compute beside our kernels (worker/cuda/libraries.py)."""
    return f"cuda {CUDA} {libraries} {gpu}{' fp8' * fp8}{' deterministic' * deterministic}"


def native_key(variant: Variant, machine: str | None = None) -> str:
    """What NATIVE calls it."""
    machine = machine or platform.machine()
    return f"{'aarch64' if machine == 'arm64' else machine} {variant.name}"  # arm64: as macOS says it
