"""Ranks of a set that exchange through gloo, forked from one process that has imported torch. Arguments: ranks, folder, and
"alone" if rank 0 of another set is then to wait for a rank that does not come. Each rank writes its answer and the addresses at
which it listens as JSON to a file of its own in the folder: lines of several processes on one pipe may run into each other."""

from __future__ import annotations

import json
import os
import sys
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import torch
from rank_process import numbers_of

from baton.errors import EngineError
from baton.models.shard import Shard
from baton.worker.collective.distributed import DistributedCollective

LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


def run(rank: int, ranks: int, folder: Path) -> None:
    collective = DistributedCollective(Shard(rank, ranks), folder, "cpu", ordered=False, wait_seconds=120.0)  # gloo always is
    rows = torch.from_numpy(numbers_of(rank, 999))
    collective.sum(rows)
    parts = collective.gather(torch.full((2,), float(rank)))
    answer = [rows.numpy().tobytes().hex(), parts.tolist(), collective.least(100 - rank), len(collective.notes(b"x"))]
    (folder / f"answer-{rank}.json").write_text(json.dumps([answer, listeners()]))
    collective.close()


def listeners() -> list[str]:
    """Addresses at which this process listens, as the kernel knows them."""
    own = {os.readlink(entry).removeprefix("socket:") for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"[{words[9]}]" in own:
                found.append(str(address_of(words[1].partition(":")[0])))
    return found


def address_of(digits: str) -> IPv4Address | IPv6Address:
    """The kernel writes 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(digits[place : place + 8]) for place in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def alone(folder: Path) -> None:
    folder.mkdir()
    try:
        DistributedCollective(Shard(0, 2), folder, "cpu", wait_seconds=0.2)
    except EngineError as error:
        print(json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            run(rank, ranks, Path(sys.argv[2]))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    if sys.argv[3:] == ["alone"]:
        alone(Path(sys.argv[2], "alone"))
