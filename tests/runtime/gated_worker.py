"""The real worker, which one rank leaves standing at a place of its start. BATON_GATE has the orders: {"rank": 1, "at": place,
"folder": f}. It touches f/reached there and goes on when f/open exists. Places, in their order: rendezvous, load, size, create
or attach, record (graphs and kernels; before the hello). "model": the rank loads this one instead."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_worker import gate

from baton.runtime.worker import process
from baton.worker import build

ORDERS = json.loads(os.environ.get("BATON_GATE", "{}"))


def gated(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wait_first(*arguments: Any, **more: Any) -> Any:
        gate({"gate": ORDERS}, place)
        return function(*arguments, **more)

    return wait_first


def main() -> None:
    begin = process.begin_child

    def begin_gated(settings: Any) -> Any:
        config, sockets = begin(settings)
        if config.rank == ORDERS.get("rank") and config.epoch in ORDERS.get("epochs", [1]):
            close_gates()
            config = replace(config, model=ORDERS.get("model", config.model))
        return config, sockets

    process.begin_child = begin_gated  # type: ignore[assignment]
    process.main()


def close_gates() -> None:
    pool: Any = process.WorkerPool
    build.open_collective = gated("rendezvous", build.open_collective)
    build._loaded = gated("load", build._loaded)
    pool.__call__ = gated("size", pool.__call__)
    pool._create = gated("create", pool._create)
    pool._attach = gated("attach", pool._attach)
    build.identity_of = gated("record", build.identity_of)


if __name__ == "__main__":
    sys.exit(main())
