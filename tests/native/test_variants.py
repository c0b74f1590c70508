"""Which kernels run on which machine, and how we find out what this one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.native.variants import VARIANTS, cpu_flags, supported_variants

HASWELL = frozenset({"fpu", "sse2", "ssse3", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"})
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
ICE_LAKE = SKYLAKE | {"avx512_vnni"}
SAPPHIRE_RAPIDS = ICE_LAKE | {"avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
ALDER_LAKE = HASWELL | {"avx_vnni"}
NEOVERSE_N1 = frozenset({"fp", "asimd", "fphp", "asimdhp", "asimddp"})
GRAVITON3 = NEOVERSE_N1 | {"i8mm", "bf16", "sve"}
RASPBERRY_PI_4 = frozenset({"fp", "asimd", "evtstrm", "crc32", "cpuid"})


def names(machine: str, flags: frozenset[str]) -> list[str]:
    return [variant.name for variant in supported_variants(machine, flags)]


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512", "avxvnni", "avx2", "plain"]),
        ("x86_64", ICE_LAKE, ["avx512", "avx2", "plain"]),
        ("x86_64", SKYLAKE, ["avx2", "plain"]),  # 512 bits without dot products
        ("x86_64", ALDER_LAKE, ["avxvnni", "avx2", "plain"]),
        ("x86_64", HASWELL, ["avx2", "plain"]),
        ("x86_64", HASWELL - {"fma"}, ["plain"]),
        ("x86_64", frozenset(), ["plain"]),
        ("aarch64", GRAVITON3, ["i8mm", "dotprod", "plain"]),
        ("aarch64", NEOVERSE_N1, ["dotprod", "plain"]),
        ("aarch64", RASPBERRY_PI_4, ["plain"]),
        ("aarch64", SAPPHIRE_RAPIDS, ["plain"]),  # flags mean something on their own kind of machine only
        ("riscv64", frozenset(), ["plain"]),
    ],
)
def test_made_up_machines(machine, flags, expected):
    assert names(machine, flags) == expected


def test_apple_silicon_takes_dot_products():
    """macOS calls the machine arm64, and has no /proc/cpuinfo to say what it can do."""
    assert [variant.name for variant in supported_variants("arm64", frozenset(), "Darwin")] == ["dotprod", "plain"]
    assert [variant.name for variant in supported_variants("x86_64", frozenset(), "Darwin")] == ["plain"]
    assert [variant.name for variant in supported_variants("arm64", NEOVERSE_N1, "FreeBSD")] == ["dotprod", "plain"]


def test_every_machine_has_one():
    """The last one asks for nothing, so the list is never empty."""
    assert VARIANTS[-1].name == "plain"
    assert VARIANTS[-1].suits("anything", frozenset())
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_this_machine():
    assert supported_variants()[-1].name == "plain"
    assert all(variant.needs <= cpu_flags() for variant in supported_variants())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: none\n", {"fpu", "avx2", "fma"}),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", {"fp", "asimd", "asimddp"}),
        ("processor : 0\n", set()),
        ("", set()),
    ],
)
def test_what_the_processor_says(monkeypatch, text, expected):
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert cpu_flags() == expected


def test_a_system_that_does_not_tell(monkeypatch):
    def refuse(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu_flags() == frozenset()
    assert supported_variants()[-1].name == "plain"
