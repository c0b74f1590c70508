"""Variants of the library: one source, compiled for different instruction sets.

Best first. Products are equal, bit for bit, in all variants with fused multiply-add (csrc/matmul_q4.h, matmul_int8.h); only
`plain` on x86 rounds twice, and with 4-bit weights AMX tiles round less than others (csrc/matmul_q4_amx.h). Attention differs:
its sums over tokens use as many lanes as a vector has. So a variant cannot use the KV blocks of another, and the keys of cached
blocks include the variant (worker/identity.py).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    machine: str
    "Architecture, as platform.machine() reports it."
    needs: frozenset[str]
    "Required flags in /proc/cpuinfo."
    compiler_flags: tuple[str, ...]
    description: str

    def suits(self, machine: str, flags: frozenset[str]) -> bool:
        return self.machine in ("", machine) and self.needs <= flags


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
_AMX = (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512_FLAGS = _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_AMX_FLAGS = _AVX512_FLAGS | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}

VARIANTS = (
    Variant("amx", "x86_64", _AMX_FLAGS, _AMX, "AVX-512 and tiles"),
    Variant("avx512", "x86_64", _AVX512_FLAGS, _AVX512, "AVX-512 with VNNI"),
    Variant("avxvnni", "x86_64", _AVX2_FLAGS | {"avx_vnni"}, (*_AVX2, "-mavxvnni"), "AVX2 with VNNI"),
    Variant("avx2", "x86_64", _AVX2_FLAGS, _AVX2, "AVX2"),
    Variant("i8mm", "aarch64", frozenset({"asimddp", "i8mm"}), ("-march=armv8.2-a+dotprod+i8mm",), "NEON, 8-bit matrices"),
    Variant("dotprod", "aarch64", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",), "NEON dot products"),
    Variant("plain", "", frozenset(), (), "whatever the compiler makes of plain C"),
)


APPLE_SILICON = frozenset({"asimddp"})
"""Features of all Apple CPUs from the M1 on. macOS has no /proc/cpuinfo."""


def supported_variants(
    machine: str | None = None, flags: frozenset[str] | None = None, system: str | None = None
) -> list[Variant]:
    """Variants for these CPU features, best first; never empty. Without arguments: for this machine."""
    machine = platform.machine() if machine is None else machine
    system = platform.system() if system is None else system
    flags = cpu_flags() if flags is None else flags
    if machine == "arm64":  # macOS names the architecture so
        machine, flags = "aarch64", flags | (APPLE_SILICON if system == "Darwin" else frozenset())
    return [variant for variant in VARIANTS if variant.suits(machine, flags)]


def cpu_flags() -> frozenset[str]:
    """Features reported by the CPU; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()
