"""`baton up` without its face, with instances that compute nothing: python -m null_up SETTINGS_JSON. Prints READY when it is.

{"serve": settings of ServeConfig, "instances": a number}. The router samples itself (null_router.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import Any

from baton.config import RouterConfig, ServeConfig
from baton.config.router_process import RouterProcessConfig
from baton.protocol.control import InstanceReady
from baton.runtime.processes.private_folder import PrivateFolder
from baton.runtime.processes.process_table import with_modules
from baton.runtime.up import ROUTER, UpConfig, UpGroup, UpReporter, up_children
from baton.trust.secret import create_secret


class Reporter(UpReporter):
    def on_ready(self, ready: InstanceReady) -> None:
        print("READY", flush=True)


async def run(settings: dict[str, Any]) -> None:
    serve, folder = ServeConfig(**settings["serve"]), PrivateFolder()
    try:
        secret, address = folder.path / "cluster.secret", f"unix:{folder.path / 'router.sock'}"
        create_secret(secret)
        names = [f"mixed-{number}" for number in range(settings["instances"])]
        engine = replace(serve.engine(), routers=(address,), cluster_secret=str(secret))
        engines = {name: replace(engine, name=name) for name in names}
        router = RouterProcessConfig(serve=serve, router=RouterConfig(), listen=address, cluster_secret=str(secret))
        rows = with_modules(up_children(names), **dict.fromkeys(names, "null_engine"), **{ROUTER: "null_router"})
        await UpGroup(UpConfig(router=router, engines=engines), Reporter(), rows).run()
    finally:
        folder.remove()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
