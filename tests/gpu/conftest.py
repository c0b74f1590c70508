"""Kernels of the GPU: on a GPU in bfloat16 and float32; elsewhere in float32 in Triton's interpreter, which needs no GPU.

The interpreter is chosen by an environment variable before a kernel is defined, so here, before anything imports one. (In
bfloat16 the interpreter is wrong: it has no such type.)
"""

import os
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidia0").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", ["cpu-float32", "cuda-bfloat16", "cuda-float32"], indirect=True)


@pytest.fixture
def place(request):
    """Where, and in which data type."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    device, dtype = request.param.split("-")
    if device == "cuda" and not (HAS_GPU and torch.cuda.is_available()):
        pytest.skip("no GPU here")
    if device == "cpu" and HAS_GPU:
        pytest.skip("Triton's interpreter and compiler do not share a process; the GPU's tests run here")
    if device == "cpu":
        from mended_interpreter import mend_interpreter

        mend_interpreter()
    from gpu_cases import Place

    return Place(device, getattr(torch, dtype))


@pytest.fixture
def gpu():
    torch = pytest.importorskip("torch")
    if not (HAS_GPU and torch.cuda.is_available()):
        pytest.skip("no GPU here")
    return torch.device("cuda")
