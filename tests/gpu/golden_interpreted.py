"""The cases of golden digests without a GPU: in float32, in Triton's interpreter, with fewer steps.

Their bits are nobody's: this shows that a case runs, gives the same twice, and computes what it is named after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from golden_cases import BLOCK, SLOTS, Case, Started
from golden_model import Part
from interpreted_steps import InterpretedSteps
from mended_interpreter import mend_interpreter
from torch import Tensor

from baton.kvpool.layout import KVKind
from baton.kvpool.pool import KVPool
from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.encoders.torch_encoder import Encoder
from baton.models.loaders.weights import RawWeights, WeightSource
from baton.models.raw_tensor import Bytes
from baton.models.torch_weights import Weights
from baton.worker.collective.base import Collective
from baton.worker.cuda.decoder_step import DecoderStep
from baton.worker.cuda.executor import CudaExecutor
from baton.worker.cuda.layer_steps import StepLimits
from baton.worker.cuda.loader import DeviceWeights
from baton.worker.cuda.weights import take_weights
from baton.worker.forward.torch_forward import of_tensors
from baton.worker.kv_layout import kv_layout

CONTEXT, DRAFT_ROWS = 112, 24


class HostWeights(DeviceWeights):
    """DeviceWeights without a device: nothing is pinned or sent."""

    def __init__(self, raw: RawWeights) -> None:
        Weights.__init__(self, raw)

    def _send(self, content: Bytes, target: Tensor) -> None:
        target.view(-1).view(torch.uint8).copy_(torch.from_numpy(content.copy()))


class Interpreter:
    name, device = "interpreter", "cpu"
    steps: Sequence[list[Part]] = ([(0, 0, 18), (1, 0, 2)], [(0, 18, 1), (1, 2, 1)], [(1, 3, 1)])

    def start(self, case: Case, config: ModelConfig, source: WeightSource, collective: Collective | None = None) -> Started:
        mend_interpreter()
        worker, raw = case.worker(), HostWeights(RawWeights(source, config))
        fp8 = worker.quantization == "fp8"
        weights = take_weights(config, raw.take, fp8=fp8, take_fp8=raw.take_fp8, take_mxfp4=raw.take_mxfp4)
        drafts = DRAFT_ROWS if worker.speculate != "none" else 0
        limits = StepLimits(rows=128, sequences=SLOTS, context_tokens=CONTEXT, drafts=drafts)
        # Only its layout counts, for the runner.
        pool = KVPool.create(kv_layout(config, BLOCK, KVKind("float32")), SLOTS * CONTEXT // BLOCK)
        dtype = torch.float8_e4m3fn if worker.kv_dtype == "fp8" else torch.float32
        kv = torch.zeros(pool.blocks, config.layers, 2, config.kv_heads, BLOCK, config.head_dim).to(dtype)
        given: dict[str, Any] = {"deterministic": worker.deterministic, "collective": of_tensors(collective)}
        step = DecoderStep(config, weights, kv, limits, **given)
        return Started(CudaExecutor(InterpretedSteps(step), "interpreter"), pool, kv)  # type: ignore[arg-type]

    def encoder(self, case: Case, config: EncoderConfig, source: WeightSource) -> Encoder:
        return Encoder(config, HostWeights(RawWeights(source, config)))
