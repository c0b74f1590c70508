"""Counts calls of what is meant for several ranks, in one thread: exchanges, digests, gathers, and messages that are combined.

With one rank there are none. A test that finds none also runs with two ranks, to see that they would be found.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import baton

PACKAGE = Path(baton.__file__).parent
WHOLE: tuple[str, ...] = ()
"""All functions of a file."""
MEANT_FOR_SEVERAL: dict[str, tuple[str, ...]] = {
    "core/worker_set.py": WHOLE,
    "core/rank_messages.py": WHOLE,
    "models/decoder.py": ("_summed",),
    "models/ranks.py": WHOLE,
    "native/exchange.py": WHOLE,
    "protocol/step.py": ("digest_of",),
    "runtime/engine/rank_messages.py": WHOLE,
    "runtime/processes/child.py": ("ToAll", "RankSet"),
    "worker/collective/distributed.py": WHOLE,
    "worker/collective/opening.py": WHOLE,
    "worker/forward/torch_forward.py": ("HostTensors",),
}
"""Files, and the functions and classes in them."""
OF_ONE_TOO = ("SlowestProgress.",)
"""Reads the progress of any worker, and not in its steps."""


def _names() -> dict[str, tuple[str, ...]]:
    """The same by the whole path. A name that has moved fails here, and not by being found nowhere."""
    found = {}
    for file, names in MEANT_FOR_SEVERAL.items():
        source = (PACKAGE / file).read_text()
        assert all(f"def {name}(" in source or f"class {name}" in source for name in names), file
        found[str(PACKAGE / file)] = names
    return found


NAMES = _names()


@contextmanager
def calls_for_several() -> Iterator[Counter[str]]:
    """Number of calls by function, of the thread that enters it."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or (names := NAMES.get(code.co_filename)) is None:
            return
        name = code.co_qualname
        if "<" not in name and not name.startswith(OF_ONE_TOO) and (names == WHOLE or name.partition(".")[0] in names):
            calls[name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
