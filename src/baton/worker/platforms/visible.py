"""Which GPUs a process sees. The driver is asked, not torch: that would take seconds.

A process of ours computes on one GPU and sees no other: its number is 0 there, whatever it is elsewhere. So nothing below has
to know the number, and no thread can be on a wrong one.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from baton.errors import DeviceError
from baton.kvpool import cuda_driver

GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""One of them is there where a driver is."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_driver() -> bool:
    return any(Path(name).exists() for name in GPU_FILES)


def visible_gpus() -> int:
    """How many GPUs this process may use. 0: none, or there is no driver."""
    if not has_driver():
        return 0
    try:
        return cuda_driver.device_count()
    except DeviceError:  # no device: an error of cuInit
        return 0


def use_only(device_index: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Of the GPUs that are visible. To be called before anything of CUDA is: the driver looks once."""
    given = environment.get(VISIBLE)
    numbers = [str(device_index)] if given is None else given.split(",")[device_index : device_index + 1]
    environment[VISIBLE] = "".join(numbers).strip()
