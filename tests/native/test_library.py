"""The C library and Python mean the same by a structure, and files and processor by a number."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from baton.errors import EngineError, InvalidConfig
from baton.models.open import open_model
from baton.native import library as native
from baton.native.library import STRUCTURES, Library, Matrix, Step


def test_structures_have_the_size_that_the_library_says(library):
    """Compared when it is loaded; this is one that was."""
    assert isinstance(library, Library)


def test_a_structure_that_differs_is_found_out_when_the_library_is_loaded(library, monkeypatch):
    class Longer(ctypes.Structure):
        _fields_ = (*Matrix._fields_, ("more", ctypes.c_int64))

    monkeypatch.setattr(native, "STRUCTURES", (Longer, *STRUCTURES[1:]))
    with pytest.raises(EngineError, match=r"Longer has .* bytes in the kernels"):
        Library(library.variant)
    monkeypatch.setattr(native, "STRUCTURES", (*STRUCTURES, Step))
    with pytest.raises(EngineError, match="other structures"):
        Library(library.variant)


def test_a_processor_that_stores_the_high_byte_first_is_refused(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(InvalidConfig, match="high byte"):
        open_model(tmp_path)
