"""GPUs that are visible to a process, from the driver: importing torch would take seconds.

Each of our processes sees exactly one GPU, with number 0. So other code needs no number, and no thread can use a wrong one.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from itertools import permutations
from pathlib import Path

from baton.errors import DeviceError
from baton.kvpool import cuda_driver

GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Device files, one of which exists if there is a driver."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_driver() -> bool:
    return any(Path(name).exists() for name in GPU_FILES)


def visible_gpus() -> int:
    """Number of GPUs that this process may use. 0: none, or no driver."""
    if not has_driver():
        return 0
    try:
        return cuda_driver.device_count()
    except DeviceError:  # cuInit fails without a device
        return 0


def without_peer_access(gpus: Sequence[int]) -> tuple[int, int] | None:
    """The first two of these GPUs of which one cannot read the other's memory. None: all of them can."""
    return next(((one, other) for one, other in permutations(gpus, 2) if not cuda_driver.can_read_peer(one, other)), None)


def use_only(device_index: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide the other GPUs. `device_index`: among the visible GPUs. Must be called before any use of CUDA: the driver reads the
    variable once."""
    given = environment.get(VISIBLE)
    numbers = [str(device_index)] if given is None else given.split(",")[device_index : device_index + 1]
    environment[VISIBLE] = "".join(numbers).strip()
