"""Ranks of a set that exchange through gloo, forked from one process that has imported torch. Arguments: ranks, folder, and
"alone" if only rank 0 comes. Each rank writes its answer as JSON to a file of its own in
the folder: lines of several processes on one pipe may run into each other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from rank_process import numbers_of

from baton.errors import EngineError
from baton.models.shard import Shard
from baton.worker.collective.distributed import DistributedCollective


def run(rank: int, ranks: int, folder: Path) -> None:
    collective = DistributedCollective(Shard(rank, ranks), folder, "cpu", wait_seconds=120.0)
    rows = torch.from_numpy(numbers_of(rank, 999))
    collective.sum(rows)
    parts = collective.gather(torch.full((2,), float(rank)))
    answer = [rows.numpy().tobytes().hex(), parts.tolist(), collective.least(100 - rank), len(collective.notes(b"x"))]
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    collective.close()


def alone(ranks: int, folder: Path) -> None:
    try:
        DistributedCollective(Shard(0, ranks), folder, "cpu", wait_seconds=0.2)
    except EngineError as error:
        print(json.dumps(str(error)), flush=True)


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    if sys.argv[3:] == ["alone"]:
        alone(ranks, Path(sys.argv[2]))
        sys.exit()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            run(rank, ranks, Path(sys.argv[2]))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
