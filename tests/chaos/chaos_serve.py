"""What `baton serve` does, without its face: python -m chaos_serve SETTINGS_JSON.

Says READY on stdout, exits 0 when it was told to stop, and 1 with what was wrong on stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import Any

from baton.config import ServeConfig
from baton.errors import EngineError
from baton.runtime.processes.process_table import SUPERVISOR_CHILDREN, with_modules
from baton.runtime.supervisor import Supervisor

SILENT_SECONDS_MAX = json.loads(os.environ.get("BATON_CHAOS", "{}")).get("silent_seconds_max", 30.0)


class ChaosSupervisor(Supervisor):
    rows = tuple(
        replace(row, silent_seconds_max=SILENT_SECONDS_MAX) for row in with_modules(SUPERVISOR_CHILDREN, engine="chaos_engine")
    )


async def serve(config: ServeConfig) -> None:
    def say(*words: object) -> None:
        print(*words, flush=True)

    await ChaosSupervisor(
        config,
        on_progress=lambda progress: say("LOADED", progress.done, progress.total),
        on_ready=lambda ready: say("READY", ready.blocks),
        on_stopping=lambda: say("STOPPING"),
        on_restart=lambda why: say("RESTART", why),
    ).run()


def with_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def main() -> int:
    try:
        asyncio.run(serve(ServeConfig(**with_tuples(json.loads(sys.argv[1])))))
    except EngineError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
