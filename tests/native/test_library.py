"""The C library and Python mean the same by a structure, and files and processor by a number."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoder_cases import QUANTISED_CASES, Conversation, load

from baton.errors import EngineError, InvalidConfig
from baton.models.open import open_model
from baton.native import library as native
from baton.native.build import build_library
from baton.native.library import STRUCTURES, Library, Matrix, NativeStep


def test_structures_have_the_size_that_the_library_says(library):
    """Compared when it is loaded; this is one that was."""
    assert isinstance(library, Library)


def test_a_structure_that_differs_is_found_out_when_the_library_is_loaded(library, monkeypatch):
    class Longer(ctypes.Structure):
        _fields_ = (*Matrix._fields_, ("more", ctypes.c_int64))

    monkeypatch.setattr(native, "STRUCTURES", (Longer, *STRUCTURES[1:]))
    with pytest.raises(EngineError, match=r"Longer has .* bytes in the kernels"):
        Library(library.variant)
    monkeypatch.setattr(native, "STRUCTURES", (*STRUCTURES, NativeStep))
    with pytest.raises(EngineError, match="other structures"):
        Library(library.variant)


def test_a_processor_that_stores_the_high_byte_first_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(InvalidConfig, match="high byte"):
        open_model(tmp_path)


def imported_symbols(file: Path) -> list[str]:
    lines = subprocess.run(["nm", "-D", "--undefined-only", str(file)], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1].split("@")[0] for line in lines.splitlines()]


def test_no_function_of_the_systems_math_library_is_called(library):
    """They round differently from one system to the next, and instances that exchange keys must not."""
    name = ctypes.util.find_library("m")
    if shutil.which("nm") is None or name is None:
        pytest.skip("nm or a math library is missing")
    imported = imported_symbols(build_library(library.variant))
    assert "pthread_create" in imported
    with_math, without = ctypes.CDLL(name), ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(without, "sincosf"):
        pytest.skip("here mathematics is part of the C library")
    assert [symbol for symbol in imported if hasattr(with_math, symbol) and not hasattr(without, symbol)] == []


def test_a_position_without_angles_fails_alone(library):
    """Nothing is read from beyond the tables, and a neighbour's numbers stay what they are."""
    talk = Conversation(replace(QUANTISED_CASES["plain"], context_tokens_max=20), [24, 7])
    forward = talk.forward(load(library, talk.config, quantization="none", kv_dtype="float32"))
    together = talk.run(forward, [talk.all_at_once()])
    alone = talk.run(forward, [[(1, 0, 7)]])
    forward.close()
    assert np.isfinite(together[0].logits[:20]).all()
    assert np.isnan(together[0].hidden[20:]).all()
    assert np.array_equal(together[1].logits, alone[1].logits)
