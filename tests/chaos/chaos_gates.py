"""Places at which a disturbed process waits until it is let go on. Whoever tests arms and opens them while it runs:

    FOLDER/NAME.PLACE.armed     holds a number: so many pass before one is held there (as JSON; empty: the first one)
    FOLDER/NAME.PLACE.reached   one is held
    the first is removed        it goes on

NAME is the instance's. What to do is JSON in $BATON_CHAOS: {"name": NAME, "gates": FOLDER, "delay": [seed, seconds],
"tiers": settings of the core's tiers}.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

ORDERS = json.loads(os.environ.get("BATON_CHAOS", "{}"))
POLL_SECONDS = 0.01


class Gate:
    def __init__(self, place: str) -> None:
        folder = ORDERS.get("gates")
        base = None if folder is None else str(Path(folder) / f"{ORDERS.get('name', '')}.{place}")
        self._armed = None if base is None else Path(f"{base}.armed")
        self._reached = None if base is None else Path(f"{base}.reached")
        self._passed = 0

    @property
    def closed(self) -> bool:
        """Asked once for each that comes. Says on disk that one is held."""
        if self._armed is None or self._reached is None or not self._armed.exists():
            self._passed = 0
            return False
        try:
            allowed = int(self._armed.read_text() or 0)
        except (OSError, ValueError):
            return False  # it was opened this moment
        self._passed += 1
        if self._passed <= allowed:
            return False
        self._reached.touch()
        return True

    @property
    def still_closed(self) -> bool:
        return self._armed is not None and self._armed.exists()

    def wait(self) -> None:
        """For a process that has nothing else to do."""
        if self.closed:
            parent = os.getppid()
            while self.still_closed and os.getppid() == parent:
                time.sleep(POLL_SECONDS)
