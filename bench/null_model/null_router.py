"""The router process as it is, with a sampler: SIGUSR1 begins a count, SIGUSR2 writes it to $BATON_ROUTER_NOTES.

Every 5 ms of processor time the stack is looked at, and the innermost file of ours or of the HTTP server names the share.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

from baton.runtime.router.process import main

SAMPLE_SECONDS = 0.005
SHARES = {
    "baton/trust/": "sealing",
    "baton/protocol/": "codec",
    "baton/core/": "machine",
    "baton/text/": "detokenizing",
    "baton/api/": "HTTP",
    "uvicorn/": "HTTP",
    "starlette/": "HTTP",
    "baton/runtime/": "processes and channels",
}
"""By part of a file's path, in this order."""
counts: Counter[str] = Counter()


def share_of(frame: FrameType | None) -> str:
    while frame is not None:
        for part, share in SHARES.items():
            if part in frame.f_code.co_filename:
                return share
        frame = frame.f_back
    return "event loop"


def save(number: int, frame: FrameType | None) -> None:
    Path(os.environ["BATON_ROUTER_NOTES"]).write_text(json.dumps(counts))


def begin(number: int, frame: FrameType | None) -> None:
    counts.clear()
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)


def sample(number: int, frame: FrameType | None) -> None:
    counts[share_of(frame)] += 1


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, sample)
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, save)
    main()
