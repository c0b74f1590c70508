"""Versions of libraries that compute beside our kernels: they round differently, so the versions are part of the arithmetic's
name."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
import triton

MAJOR, MINOR, PATCH = range(3)
"""Values of libraryPropertyType."""


@cache
def library_versions() -> str:
    return f"torch {torch.__version__} triton {triton.__version__} cublas {_cublas_version()}"


def _cublas_version() -> str:
    """Version of cuBLAS. torch has loaded it but does not report the version, and one version of torch comes with several."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '0').partition('.')[0]}")
        numbers = [ctypes.c_int() for _ in (MAJOR, MINOR, PATCH)]
        if any(library.cublasGetProperty(which, ctypes.byref(number)) for which, number in enumerate(numbers)):
            return "unknown"
    except (OSError, AttributeError):
        return "unknown"
    return ".".join(str(number.value) for number in numbers)
