"""Chooses the hardware, and resolves "auto". Code below this file gets resolved settings.

--device   cuda   an NVIDIA GPU, or an error with what is missing
           cpu    torch is not imported
           NAME   the plug-in of that name (plug_ins.py)
           auto   cuda if torch sees a GPU and the model is not a GGUF file: a CPU computes on its blocks directly, a GPU on
                  16-bit weights
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from baton.config import Quantization, WorkerConfig
from baton.errors import InvalidConfig
from baton.worker.platforms.base import Platform
from baton.worker.platforms.cpu import CpuPlatform
from baton.worker.platforms.plug_ins import open_plug_in
from baton.worker.platforms.visible import has_driver

log = logging.getLogger(__name__)

CPU_KV_GIB = 2.0
GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory. Instances that share one divide it: each may use memory up to the end of its own part, after those
of earlier ones."""
ATTACHER_GIB = 0.6
"""GPU memory of the cache service after it attaches to the KV pool: its CUDA context, without torch."""


def choose(config: WorkerConfig, path: Path) -> tuple[Platform, WorkerConfig]:
    """The platform, and the settings without "auto". `path`: the model's files. Raises InvalidConfig."""
    device, why = config.device, "as was asked"
    if device == "auto":
        why = no_cuda_for(path)
        device, why = ("cpu", why) if why else ("cuda", "torch sees an NVIDIA GPU")
    if device == "cuda":
        platform, resolved = _cuda(config)
    elif device == "cpu":
        platform, resolved = CpuPlatform(), _for_cpu(config)
    else:
        platform, resolved = open_plug_in(device, config, path)
    log.log(logging.DEBUG if why == NO_DRIVER else logging.INFO, "device %s: %s", device, why)
    return platform, resolved


NO_DRIVER = "there is no NVIDIA driver here"


def no_cuda_for(path: Path) -> str:
    """Reason why no GPU is used. Empty: a GPU is used."""
    if not has_driver():  # checked first: importing torch takes seconds
        return NO_DRIVER
    if path.is_file():
        return "a GGUF file is computed on a CPU unless --device cuda is given"
    return missing_for_cuda()


def missing_for_cuda() -> str:
    """Name the package or device that is missing for a GPU. Empty: none."""
    try:
        from baton.worker.platforms.cuda import missing_gpu
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install torch"
    return missing_gpu()


def _cuda(config: WorkerConfig) -> tuple[Platform, WorkerConfig]:
    """The CUDA platform, with settings resolved for it. Raises InvalidConfig for settings that a GPU does not support."""
    missing = missing_for_cuda()
    if missing:
        raise InvalidConfig(f"--device cuda: {missing}; or take --device cpu")
    if config.quantization in ("int8", "int4"):
        raise InvalidConfig(
            f"--quantization {config.quantization} is for CPUs: on a GPU weights are kept in --dtype or in fp8; leave it out, "
            "or take --device cpu"
        )
    if config.compute == "native":
        raise InvalidConfig("--compute native is for CPUs; leave it out, or take --device cpu")
    from baton.worker.platforms.cuda import CudaPlatform

    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    if config.kv_dtype not in ("auto", dtype, "fp8"):
        raise InvalidConfig(f"--kv-cache-dtype {config.kv_dtype}: on a GPU the KV cache is fp8 or as activations are, {dtype}")
    if config.compute == "torch" and "fp8" in (config.kv_dtype, config.quantization):
        raise InvalidConfig(
            "fp8 needs our kernels for GPUs: leave --compute torch out, or --quantization and --kv-cache-dtype fp8"
        )
    quantization: Quantization = "fp8" if config.quantization == "fp8" else "none"
    share = config.memory_utilization
    if share is None and config.blocks is None and config.kv_memory_gib is None:
        share = GPU_MEMORY_SHARE
    own = (share or 0.0) / config.device_sharers
    resolved = replace(
        config,
        device="cuda",
        dtype=dtype,
        quantization=quantization,
        memory_utilization=None if share is None else own * (config.device_place + 1),
        memory_reserved_gib=0.0 if config.pool == "private" else ATTACHER_GIB,  # the host tier is not in the GPU's memory
    )
    return CudaPlatform(share_of_others=own * config.device_place), resolved


def _for_cpu(config: WorkerConfig) -> WorkerConfig:
    if "fp8" in (config.quantization, config.kv_dtype):
        raise InvalidConfig(
            "--quantization fp8 and --kv-cache-dtype fp8 are for GPUs: a CPU has int8 (leave them out for the best)"
        )
    if config.dtype == "bfloat16":
        raise InvalidConfig(
            "--dtype bfloat16 is for GPUs: a CPU computes in float32; leave it out (--quantization says how weights are kept)"
        )
    return replace(config, device="cpu", dtype="float32", kv_memory_gib=config.kv_memory_gib or CPU_KV_GIB)
