"""`baton serve` without its face and without a model: python -m null_serve SETTINGS_JSON. Says READY when it is."""

from __future__ import annotations

import asyncio
import json
import sys

from baton.config import ServeConfig
from baton.runtime.processes.process_table import SUPERVISOR_CHILDREN, with_modules
from baton.runtime.supervisor import Supervisor


class NullSupervisor(Supervisor):
    rows = with_modules(SUPERVISOR_CHILDREN, engine="null_engine")


async def serve(config: ServeConfig) -> None:
    await NullSupervisor(config, on_ready=lambda ready: print("READY", flush=True)).run()


def main() -> None:
    asyncio.run(serve(ServeConfig(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
