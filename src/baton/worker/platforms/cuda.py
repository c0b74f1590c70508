"""An NVIDIA GPU: weights, KV pool and steps in its memory. torch must be installed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from baton.config import WorkerConfig
from baton.config.device_defaults import StepDefaults, gpu_defaults
from baton.errors import InvalidConfig, ModelUnsupported
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVDtype, KVKind, KVLayout
from baton.kvpool.memory import GIB, MemoryFacts
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress, RawWeights
from baton.models.open import OpenedEncoder, OpenedModel
from baton.models.ranks import TensorCollective
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady
from baton.worker.collective.base import Collective
from baton.worker.cuda.plain_executor import load_plain
from baton.worker.executors.base import LoadedExecutor
from baton.worker.forward.torch_forward import of_tensors
from baton.worker.platforms.lacks import cuda_lacks

if TYPE_CHECKING:
    from baton.models.encoders.torch_encoder import Encoder

log = logging.getLogger(__name__)

DEVICE = 0
"""Device index: a rank has one GPU, the only one visible to its process (visible.py)."""
CONTEXT_BYTES = 1 * GIB
"""Upper bound of a worker's CUDA context and kernels, with 16-bit weights and activations: 0.85 GiB on an H200."""


def missing_gpu() -> str:
    """Reason why no GPU can be used. Empty: a GPU can be used."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build for NVIDIA GPUs (see pytorch.org)"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU: check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"
    return ""


class CudaPlatform:
    name = "cuda"
    shares_pools = True

    def __init__(self, share_of_others: float = 0.0) -> None:
        """`share_of_others`: share of the GPU's memory that belongs to instances started before."""
        self._share_of_others = share_of_others
        self._pools: list[DevicePool] = []
        "Created pools: those of the model and of a draft model, and earlier ones that are closed."

    def step_defaults(self, sharers: int) -> StepDefaults:
        return gpu_defaults(self.memory().total_bytes / sharers / GIB)

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        return KVKind(kv_dtype(settings), "token-major")

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None) -> LoadedExecutor:
        return self._loaded(opened, settings, progress, None)

    def load_part(
        self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None, collective: Collective
    ) -> LoadedExecutor:
        return self._loaded(opened, settings, progress, of_tensors(collective))

    def _loaded(
        self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None, collective: TensorCollective | None
    ) -> LoadedExecutor:
        torch.cuda.set_device(DEVICE)
        kind = self.kv_kind(opened.config, settings)
        lacks = cuda_lacks(opened.config)
        if lacks and settings.compute == "native":
            raise ModelUnsupported(f"our kernels for GPUs do not compute {', '.join(lacks)}: take --compute torch")
        if lacks:
            log.warning("the model runs in torch, which is several times slower: no kernel computes %s", ", ".join(lacks))
        if lacks or settings.compute == "torch":
            return load_plain(opened, settings, kind, progress, collective)
        from baton.worker.cuda.executor import load_cuda  # this import loads triton

        return load_cuda(opened, settings, kind, progress, collective)

    def encoder(self, opened: OpenedEncoder, raw: RawWeights, settings: WorkerConfig) -> Encoder:
        from baton.models.encoders.torch_encoder import Encoder
        from baton.worker.cuda.loader import DeviceWeights  # imports triton

        with DeviceWeights(raw, settings.dtype, opened.files) as weights:
            return Encoder(opened.config, weights)

    def memory(self) -> MemoryFacts:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # so that torch's cached memory counts as free
        free, total = torch.cuda.mem_get_info(DEVICE)
        if not self._share_of_others:
            return MemoryFacts(total, free)
        # Another instance may be restarting and will need its part again.
        pools = sum(pool.nbytes for pool in self._pools if pool.address)
        own = torch.cuda.memory_reserved(DEVICE) + CONTEXT_BYTES + pools
        return MemoryFacts(total, min(free, max(0, int(total * (1 - self._share_of_others)) - own)))

    def memory_of_step(self, run: Callable[[], object]) -> int:
        """The peak that torch reserved, which is more than it used because of fragmentation."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved(DEVICE)
        torch.cuda.empty_cache()
        return max(0, peak - torch.cuda.memory_reserved(DEVICE))

    def create_pool(self, layout: KVLayout, blocks: int, incarnation: PoolIncarnation | None = None) -> DevicePool:
        pool = DevicePool.create(layout, blocks, DEVICE, incarnation)
        self._pools = [*(one for one in self._pools if one.address), pool]
        return pool

    def attach_pool(self, fd: int, announced: PoolReady) -> DevicePool:
        return DevicePool.attach(fd, announced)


def kv_dtype(settings: WorkerConfig) -> KVDtype:
    if settings.kv_dtype == "fp8":
        return "float8_e4m3fn"
    if settings.dtype == "auto":
        raise InvalidConfig("dtype is auto: platforms/choose.py says what it means")
    return settings.dtype
