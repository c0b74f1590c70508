"""Sampling columns of the host (worker/sampling_columns.py), copied to the device for the slots that have changed.

One copy: all columns as rows of one int64 matrix, numbers with a fraction by their bits.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.worker.arrays import Int64s
from baton.worker.cuda.kernels.sample import SamplingColumns as DeviceColumns
from baton.worker.sampling_columns import SamplingColumns


def write_columns(device: DeviceColumns, host: SamplingColumns, slots: Int64s) -> None:
    """On the current stream."""
    draws = host.draws[slots]
    rows = np.empty((7, len(slots)), np.int64)
    rows[0] = slots
    for row, name in ((1, "temperature"), (2, "top_p"), (3, "min_p")):
        rows[row] = draws[name].astype(np.float64).view(np.int64)
    rows[4] = np.maximum(draws["top_k"], 0)
    rows[5] = host.seeds[slots].view(np.int64)
    rows[6] = host.indices[slots].view(np.int64)
    sent = torch.from_numpy(rows)
    if device.seed.is_cuda:
        sent = sent.pin_memory().to(device.seed.device, non_blocking=True)
    at = sent[0]
    for column, row in ((device.temperature, 1), (device.top_p, 2), (device.min_p, 3)):
        column.index_copy_(0, at, sent[row].view(torch.float64).to(column.dtype))
    for column, row in ((device.top_k, 4), (device.seed, 5), (device.sequence_index, 6)):
        column.index_copy_(0, at, sent[row].to(column.dtype))
