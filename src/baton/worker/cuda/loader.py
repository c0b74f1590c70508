"""Loads weights from files directly to the device: stored bytes, through a ring of pinned buffers, cast on the device.

file --threads read--> pinned buffer --DMA--> device (-- cast or unpacked, if it is stored in another type -->)
                       while one buffer is filled, the others are sent
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from baton.errors import ModelUnsupported
from baton.models.files import MappedFile
from baton.models.loaders.weights import RawWeights
from baton.models.raw_tensor import Bytes, RawTensor
from baton.models.tensor_types import F8_E4M3
from baton.models.torch_weights import PLAIN_TYPES, Weights
from baton.worker.cuda.file_bytes import FileBytes
from baton.worker.cuda.kernels.fp8 import FP8, Scales, can_stack, scales_of_blocks, unpack_blocks

BUFFER_BYTES = 64 << 20
BUFFERS = 3
THREADS = 8
"""Number of reading threads: a single one is slower than the bus."""


class DeviceWeights(Weights):
    """A context manager: at its end its buffers and threads are released, and all copies are complete."""

    def __init__(
        self, raw: RawWeights, dtype: Literal["auto", "float32", "bfloat16"], files: Sequence[MappedFile] = ()
    ) -> None:
        """files: the model's weight files."""
        super().__init__(raw, dtype=torch.float32 if dtype == "float32" else torch.bfloat16, device="cuda")
        self._ring = [_Buffer() for _ in range(BUFFERS)]
        self._next = 0
        self._threads = ThreadPoolExecutor(THREADS, "weights")
        self._files = FileBytes(files)

    def __enter__(self) -> DeviceWeights:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._files.close()
        torch.cuda.synchronize()
        self._ring.clear()

    def stacked(self, parts: Sequence[RawTensor]) -> Tensor:
        rows = [raw.shape[0] for raw in parts]
        out = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        for raw, place in zip(parts, torch.split(out, rows), strict=True):
            stored = FP8 if raw.type == F8_E4M3 else PLAIN_TYPES.get(raw.type)
            if stored is None:
                raise ModelUnsupported(f"weights of type {raw.type.name} are not computed on a GPU: take --device cpu")
            if stored == out.dtype:
                self._send(raw.data.reshape(-1), place)
                continue
            as_stored = torch.empty(raw.shape, dtype=stored, device=self.device)
            self._send(raw.data.reshape(-1), as_stored)
            if raw.scales is None:
                place.copy_(as_stored)
            else:
                unpack_blocks(as_stored, torch.from_numpy(raw.scales).to(self.device), place)
        return out

    def take_fp8(self, names: Sequence[str]) -> tuple[Tensor, Scales] | None:
        """Matrices stored in fp8, unconverted, stacked as in take(). None: not all are in fp8, or they cannot be stacked."""
        stored = [self._raw.stored[name] for name in names]
        sizes, inputs = [one.rows for one in stored], stored[0].row_elements
        if any(one.type != F8_E4M3 for one in stored) or not can_stack(sizes, inputs):
            return None
        out, of_blocks = torch.empty(sum(sizes), inputs, dtype=FP8, device=self.device), []
        for name, place in zip(names, torch.split(out, sizes), strict=True):
            raw = self._raw.take(name)
            if raw.scales is None:
                raise ValueError(f"{name} has no scales")
            self._send(raw.data.reshape(-1), place)
            of_blocks.append(torch.from_numpy(raw.scales).to(self.device))
        return out, scales_of_blocks(of_blocks, sizes, inputs)

    def bytes_of(self, parts: Sequence[RawTensor]) -> Tensor:
        rows, width = [len(raw.data) for raw in parts], parts[0].data.shape[1]
        out = torch.empty(sum(rows), width, dtype=torch.uint8, device=self.device)
        for raw, place in zip(parts, torch.split(out, rows), strict=True):
            self._send(raw.data.reshape(-1), place)
        return out

    def _send(self, content: Bytes, target: Tensor) -> None:
        arrived = target.view(-1).view(torch.uint8)
        for at in range(0, len(content), BUFFER_BYTES):
            buffer = self._ring[self._next]
            self._next = (self._next + 1) % BUFFERS
            part = content[at : at + BUFFER_BYTES]
            buffer.fill(part, self._threads, self._files)
            arrived[at : at + len(part)].copy_(buffer.pinned[: len(part)], non_blocking=True)
            buffer.sent.record()


class _Buffer:
    def __init__(self) -> None:
        self.pinned = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, content: Bytes, threads: ThreadPoolExecutor, files: FileBytes) -> None:
        self.sent.synchronize()  # the previous content of the buffer was sent
        target: Bytes = self.pinned.numpy()
        piece = -(-len(content) // THREADS)
        ends = [(at, min(at + piece, len(content))) for at in range(0, len(content), piece)]
        for read in [threads.submit(files.read, content[begin:end], target[begin:end]) for begin, end in ends]:
            read.result()
