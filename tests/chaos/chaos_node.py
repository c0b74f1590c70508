"""An instance of a cluster, disturbed: its worker waits before plans, its cache service before pulls, and what it tells the
router about a hand-off waits at a gate that has the message's name (chaos_gates.py)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from chaos_gates import ORDERS, POLL_SECONDS, Gate

from baton.config.engine import TiersConfig
from baton.config.instance import TierConfig
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.runtime.engine.process import Engine, main
from baton.runtime.processes.process_table import ENGINE_CHILDREN, with_modules


class ChaosNode(Engine):
    rows = with_modules(ENGINE_CHILDREN, worker="chaos_node_worker", cache="chaos_cache")

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._gates = {kind: Gate(kind.__name__) for kind in (Reserved, Offer, Release, Released, Adopted)}
        self._pass_on = self._callers.forward
        self._callers.forward = self._pass_on_when_open  # type: ignore[method-assign]
        self._held: list[asyncio.Task[None]] = []

    def _pass_on_when_open(self, message: Any) -> None:
        gate = self._gates[type(message)]
        if gate.closed:
            self._held.append(asyncio.create_task(self._later(gate, message)))
        else:
            self._pass_on(message)

    async def _later(self, gate: Gate, message: Any) -> None:
        while gate.still_closed:
            await asyncio.sleep(POLL_SECONDS)
        self._pass_on(message)


def with_tiers(**changes: Any) -> None:
    """Sets what no option sets."""
    usual = TiersConfig.machine

    def changed(self: TiersConfig, block_bytes: int) -> TierConfig:
        return replace(usual(self, block_bytes), **changes)

    TiersConfig.machine = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    if "tiers" in ORDERS:
        with_tiers(**ORDERS["tiers"])
    main(ChaosNode)
