"""Exchanges through torch.distributed: NCCL if every rank has a GPU of its own, else gloo.

Notes are exchanged through files, so that a rank that does not come is named: a failed exchange of torch does not say which.
The ranks run on one machine, and meet on its loopback interface. Neither package authenticates who connects, and left alone
both listen on a network: gloo at the address of the host name.

Gloo works on copies in main memory. NCCL's sums can be recorded in CUDA graphs. Its order of additions depends on a number's
place in the buffer, so with more than two ranks the bits of a row would depend on its batch: `ordered` gathers instead, and
adds in the order of ranks, in float32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.errors import EngineError
from baton.models.shard import Shard

_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"Gathers tensors of all ranks. torch 2.13 renames the function, and the former name warns on every rank."

LOOPBACK: Final = "lo" if sys.platform == "linux" else "lo0"
WAIT_SECONDS = 600.0
"""Maximum wait for another rank. It is long because the ranks load weights between two exchanges."""


class DistributedCollective:
    def __init__(
        self, shard: Shard, folder: Path, device_name: str, *, ordered: bool = True, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        """`folder`: private to this start of the set; the ranks find each other there. `device_name`: cpu or cuda."""
        device = torch.device("cuda", 0) if device_name == "cuda" else torch.device(device_name)
        self.rank, self.ranks = shard.rank, shard.ranks
        self._store = store = FileStore(str(folder / "ranks"), shard.ranks)
        store.set_timeout(timedelta(seconds=wait_seconds))
        self._wait_seconds = wait_seconds
        self._noted = 0
        self.backend = self._backend_for(device)
        self.ordered = ordered or self.backend == "gloo"
        self.in_graphs = self.backend == "nccl"
        "Whether sums and gathers can be recorded in a CUDA graph."
        _stay_on_loopback()
        try:
            dist.init_process_group(
                self.backend,
                store=store,
                rank=shard.rank,
                world_size=shard.ranks,
                timeout=timedelta(seconds=wait_seconds),
                device_id=device if self.in_graphs else None,
            )
        except RuntimeError as error:
            raise self._failed("the ranks did not find each other", error) from error

    @torch.inference_mode()
    def sum(self, rows: Tensor) -> None:
        if not self.ordered:
            self._call(dist.all_reduce, rows)
            return
        parts = self.gather(rows)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        rows.copy_(total)

    @torch.inference_mode()
    def gather(self, part: Tensor) -> Tensor:
        here = part.contiguous() if self.in_graphs else part.cpu().contiguous()
        out = here.new_empty(self.ranks, *here.shape)
        self._call(_gather_into, out.view(-1, *here.shape[1:]), here)
        return out.to(part.device)

    def notes(self, note: bytes) -> list[bytes]:
        self._noted += 1
        self._store.set(f"{self._noted} {self.rank}", note.hex())
        return [self._note_of(rank) for rank in range(self.ranks)]

    def _note_of(self, rank: int) -> bytes:
        try:
            return bytes.fromhex(self._store.get(f"{self._noted} {rank}").decode())
        except RuntimeError as error:
            waited = f"within {self._wait_seconds:g} seconds"
            raise EngineError(f"rank {rank} did not answer rank {self.rank} {waited}") from error

    def least(self, number: int) -> int:
        return min(int(note) for note in self.notes(str(number).encode()))

    def start_is_over(self) -> None:
        """Nothing changes: torch keeps a group's limit, which is longer than a step's unless start_seconds_max is short."""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, operation: Callable[..., object], *tensors: Tensor) -> None:
        try:
            operation(*tensors)
        except RuntimeError as error:
            raise self._failed(f"rank {self.rank} lost the other ranks", error) from error

    def _failed(self, what: str, error: Exception) -> EngineError:
        return EngineError(f"{what} ({self.backend}): {str(error).splitlines()[0]}")

    def _backend_for(self, device: torch.device) -> str:
        """The backend for these ranks. NCCL refuses two ranks on one GPU."""
        own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        devices = self.notes(own.encode())
        on_own_gpus = device.type == "cuda" and len(set(devices)) == self.ranks
        return "nccl" if on_own_gpus and dist.is_nccl_available() else "gloo"


def _stay_on_loopback() -> None:
    """Set the variables that both packages read when they start; torch passes them no device. Values from outside are meant for
    programs that span machines, and are replaced."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    os.environ["NCCL_SOCKET_IFNAME"] = f"={LOOPBACK}"  # "=": not every name that begins so
