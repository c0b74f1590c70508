"""An NVIDIA GPU: weights, KV pool and steps in its memory. torch must be installed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from baton.config import WorkerConfig
from baton.config.device_defaults import StepDefaults, gpu_defaults
from baton.errors import InvalidConfig, ModelUnsupported
from baton.kvpool.device_pool import DevicePool
from baton.kvpool.layout import KVDtype, KVKind, KVLayout
from baton.kvpool.memory import GIB, MemoryFacts
from baton.models.config import ModelConfig
from baton.models.loaders.weights import Progress
from baton.models.open import OpenedModel
from baton.protocol.pool import PoolReady
from baton.worker.cuda.plain_executor import load_plain
from baton.worker.executors.base import LoadedExecutor
from baton.worker.platforms.lacks import cuda_lacks

log = logging.getLogger(__name__)

DEVICE = 0
"""One rank, one GPU: the only one that this process sees (visible.py)."""
CONTEXT_BYTES = 1 * GIB
"""Of a worker's CUDA context and kernels, at most, with weights and activations of 16 bits: 0.85 GiB on an H200."""


def missing_gpu() -> str:
    """Why nothing can be computed on a GPU. Empty: it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build for NVIDIA GPUs (see pytorch.org)"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU: check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"
    return ""


class CudaPlatform:
    name = "cuda"
    shares_pools = True

    def __init__(self, share_of_others: float = 0.0) -> None:
        """`share_of_others`: of the GPU's memory, which belongs to instances that were started on it before."""
        self._share_of_others = share_of_others
        self._pool: DevicePool | None = None

    def step_defaults(self, sharers: int) -> StepDefaults:
        return gpu_defaults(self.memory().total_bytes / sharers / GIB)

    def kv_kind(self, model: ModelConfig, settings: WorkerConfig) -> KVKind:
        return KVKind(kv_dtype(settings), "token-major")

    def load(self, opened: OpenedModel, settings: WorkerConfig, progress: Progress | None = None) -> LoadedExecutor:
        torch.cuda.set_device(DEVICE)
        kind = self.kv_kind(opened.config, settings)
        lacks = cuda_lacks(opened.config)
        if lacks and settings.compute == "native":
            raise ModelUnsupported(f"our kernels for GPUs do not compute {', '.join(lacks)}: take --compute torch")
        if lacks:
            log.warning("the model runs in torch, which is several times slower: no kernel computes %s", ", ".join(lacks))
        if lacks or settings.compute == "torch":
            return load_plain(opened, settings, kind, progress)
        from baton.worker.cuda.executor import load_cuda  # brings triton

        return load_cuda(opened, settings, kind, progress)

    def memory(self) -> MemoryFacts:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what torch keeps for later is free
        free, total = torch.cuda.mem_get_info(DEVICE)
        if not self._share_of_others:
            return MemoryFacts(total, free)
        # One of the others may be lost just now, and wants its part again when it is back.
        pool = self._pool.nbytes if self._pool is not None and self._pool.address else 0
        own = torch.cuda.memory_reserved(DEVICE) + CONTEXT_BYTES + pool
        return MemoryFacts(total, min(free, max(0, int(total * (1 - self._share_of_others)) - own)))

    def memory_of_step(self, run: Callable[[], object]) -> int:
        """The most that torch reserved meanwhile, which is more than it used: pieces do not fit everywhere."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved(DEVICE)
        torch.cuda.empty_cache()
        return max(0, peak - torch.cuda.memory_reserved(DEVICE))

    def create_pool(self, layout: KVLayout, blocks: int) -> DevicePool:
        self._pool = DevicePool.create(layout, blocks, DEVICE)
        return self._pool

    def attach_pool(self, fd: int, announced: PoolReady) -> DevicePool:
        return DevicePool.attach(fd, announced)


def kv_dtype(settings: WorkerConfig) -> KVDtype:
    if settings.kv_dtype == "fp8":
        return "float8_e4m3fn"
    if settings.dtype == "auto":
        raise InvalidConfig("dtype is auto: platforms/choose.py says what it means")
    return settings.dtype
