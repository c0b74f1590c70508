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


def mend_interpreter():
    """numpy 2.4 makes no number of an array of one any more; Triton 3.6's interpreter wants that of loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    if patch.__name__ != "patch_and_mend":
        interpreter._patch_lang_tensor = patch_and_mend


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
        mend_interpreter()
    from gpu_cases import Place

    return Place(device, getattr(torch, dtype))


@pytest.fixture
def gpu():
    torch = pytest.importorskip("torch")
    if not (HAS_GPU and torch.cuda.is_available()):
        pytest.skip("no GPU here")
    return torch.device("cuda")
