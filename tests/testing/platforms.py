"""The platforms of this repository, as the suite sees them (baton.testing.PlatformConformance).

native               our CPU kernels                          cuda                 our GPU kernels
torch                the oracle itself: must agree with       cuda-torch           plain torch on the GPU
                     itself through chunks and preemptions    cuda-deterministic   the GPU kernels with --deterministic
interpreted          the GPU kernels in Triton's interpreter  numpy                the plug-in of examples/numpy_platform
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rig import skip_without_a_compiler

from baton.kvpool.layout import KVKind
from baton.models.config import ModelConfig
from baton.models.loaders.weights import RawWeights, WeightSource
from baton.native.build import NoCompiler
from baton.testing.platforms import SMALL, PlatformUnderTest, on_device, with_vocabulary
from baton.testing.step_rig import RigModel
from baton.worker.executors.base import LoadedExecutor


def open_platform(name: str) -> PlatformUnderTest:
    if name == "interpreted":
        return _interpreted()
    if name == "numpy":
        return on_device("numpy")
    if name.startswith("cuda"):
        return _on_gpu(name)
    compute: Any = name
    try:
        platform = on_device("cpu", name=name, compute=compute, same_bits=name == "native")
        platform.model()
    except NoCompiler as error:
        skip_without_a_compiler(error)
    return platform


def _on_gpu(name: str) -> PlatformUnderTest:
    import torch

    if not (Path("/dev/nvidia0").exists() and torch.cuda.is_available()):
        pytest.skip("no GPU here")
    kind = name.partition("-")[2]
    settings: dict[str, Any] = {"compute": "torch" if kind == "torch" else "auto", "deterministic": kind == "deterministic"}
    return on_device("cuda", name=name, config=SMALL, same_bits=kind == "deterministic", **settings)


def _interpreted() -> PlatformUnderTest:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    if Path("/dev/nvidia0").exists():
        pytest.skip("Triton's interpreter and compiler do not share a process; the GPU's tests run here")
    from mended_interpreter import mend_interpreter

    mend_interpreter()
    return PlatformUnderTest(
        name="interpreted", load=_load_interpreted, slots=4, prompt_tokens_max=20, output_tokens=5, slow=True
    )


def _load_interpreted(config: ModelConfig, weights: WeightSource) -> RigModel:
    """Its pool is a tensor; the rig's own is only counted."""
    import torch
    from interpreted_steps import InterpretedSteps

    from baton.models.torch_weights import Weights
    from baton.worker.cuda.decoder_step import DecoderStep
    from baton.worker.cuda.executor import CudaExecutor
    from baton.worker.cuda.layer_steps import StepLimits
    from baton.worker.cuda.weights import take_weights

    taken = take_weights(config, Weights(RawWeights(weights, config)).take)

    def with_pool(pool: Any, context_tokens: int | None = None, /) -> CudaExecutor:
        layout = pool.layout
        shape = (pool.blocks, layout.layers, 2, layout.kv_heads, layout.block_size, layout.head_dim)
        limits = StepLimits(rows=64, sequences=4, context_tokens=config.context_tokens_max)
        return CudaExecutor(
            InterpretedSteps(DecoderStep(config, taken, torch.full(shape, float("nan")), limits)), "interpreter"
        )

    return with_vocabulary(RigModel(config, LoadedExecutor(KVKind("float32"), with_pool)))
