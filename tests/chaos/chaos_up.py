"""What `baton up` does, without its face, with disturbed instances: python -m chaos_up SETTINGS_JSON.

{"serve": ServeConfig, "router": RouterConfig, "instances": {name: {"role": role, "orders": orders}}, "folder": private folder,
"transfer_address": of every instance, "certificate": options of every instance}
Says READY on stdout, LOST for each child that was lost, exits 0 when it was told to stop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos_serve import with_tuples

from baton.config import RouterConfig, ServeConfig
from baton.config.router_process import RouterProcessConfig
from baton.errors import EngineError
from baton.protocol.control import InstanceReady
from baton.runtime.processes.process_table import Restart
from baton.runtime.up import UpConfig, UpGroup, UpReporter, up_children
from baton.trust.secret import create_secret


class Reporter(UpReporter):
    def on_lost(self, name: str, why: str) -> None:
        print("LOST", name, why, flush=True)

    def on_ready(self, ready: InstanceReady) -> None:
        print("READY", ready.blocks, flush=True)


async def run(settings: dict[str, Any]) -> None:
    folder, serve = Path(settings["folder"]), ServeConfig(**with_tuples(settings["serve"]))
    secret, address = folder / "cluster.secret", f"unix:{folder / 'router.sock'}"
    create_secret(secret)
    router = RouterProcessConfig(
        serve=serve, router=RouterConfig(**settings["router"]), listen=address, cluster_secret=str(secret)
    )
    engines, orders = {}, {}
    for name, instance in settings["instances"].items():
        engine = replace(serve.engine(), role=instance["role"], name=name)
        cluster = {"routers": (address,), "cluster_secret": str(secret), "transfer_address": settings["transfer_address"]}
        engines[name] = replace(engine, **cluster, **settings["certificate"])
        orders[name] = {"BATON_CHAOS": json.dumps({"name": name, **instance.get("orders", {})})}
    rows = [
        replace(row, module="chaos_node", environment={**row.environment, **orders[row.name]})
        if row.name in orders
        else replace(row, restart=Restart.ALWAYS)  # a router that is killed more often than `up` would stand
        for row in up_children(engines)
    ]
    await UpGroup(UpConfig(router=router, engines=engines), Reporter(), tuple(rows)).run()


def main() -> int:
    try:
        asyncio.run(run(json.loads(sys.argv[1])))
    except EngineError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
