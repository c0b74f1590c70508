"""Versions of a worker's arithmetic, as part of the identity (worker/identity.py).

Two workers with the same arithmetic give the same bits for the same tokens, so one can use the keys and values of the other.
The name therefore changes exactly when bits do. A digest of the sources would change with every comment, and invalidate all
stored blocks.

A change of a backend's bits raises its number. For the C kernels a test enforces this: it compares digests of a small model's
logits with those recorded for the number (tests/native/test_golden.py). Each variant has its own number.
"""

from __future__ import annotations

import platform

from baton.native.variants import Variant

NATIVE: dict[str, int] = {
    "x86_64 amx": 2,
    "x86_64 avx512": 2,
    "x86_64 avxvnni": 2,
    "x86_64 avx2": 2,
    "x86_64 plain": 2,
    "aarch64 i8mm": 2,
    "aarch64 dotprod": 2,
    "aarch64 plain": 2,
}
"""Versions of native/: csrc, and the preparation of weights and angles (native/packing.py, native/balance.py,
models/rotary.py)."""
NATIVE_ELSEWHERE = 1
"""Version of plain C on other machines."""
TORCH = 2
"""Version of models/decoder.py and its layers. Checked by tests/worker/test_torch_golden.py."""
CUDA, CUDA_FLOAT32 = 1, 2
"""Versions of the kernels in worker/cuda/, and of the preparation of their weights and angles, in bfloat16 and in float32.
Checked by tests/gpu/test_golden_on_gpu.py."""


def native_arithmetic(variant: Variant, machine: str | None = None) -> str:
    key = native_key(variant, machine)
    return f"native {key} {NATIVE.get(key, NATIVE_ELSEWHERE)}"


def cuda_arithmetic(gpu: str, libraries: str, *, dtype: str, fp8: bool, deterministic: bool) -> str:
    """Name of the arithmetic on a GPU. `libraries`: versions of the libraries beside our kernels (worker/cuda/libraries.py)."""
    float32 = dtype == "float32"
    number = CUDA_FLOAT32 if float32 else CUDA
    return f"cuda {number} {libraries} {gpu}{' float32' * float32}{' fp8' * fp8}{' deterministic' * deterministic}"


def native_key(variant: Variant, machine: str | None = None) -> str:
    """The key in NATIVE."""
    machine = machine or platform.machine()
    return f"{'aarch64' if machine == 'arm64' else machine} {variant.name}"  # macOS names the architecture so
