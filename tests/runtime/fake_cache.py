"""The cache service's process with the layout of fake_worker.py. Its orders are in the worker's, under "cache":

gate    {"at": place, "folder": f}: touch f/reached there and go on when f/open exists; places: start, create, attach,
        tiers, detach
fails   at that place, with an error
"""

from __future__ import annotations

import json
import sys

from fake_worker import LAYOUT_FIELDS, gate

from baton.errors import EngineError
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.pool import CreatePool, PoolReady
from baton.runtime.cache import process as cache


class FakeCache(cache.CacheProcess):
    def _reach(self, place: str) -> None:
        orders = json.loads(self._config.worker.model).get("cache", {})
        gate(orders, place)
        if orders.get("fails") == place:
            raise EngineError(f"the cache service cannot {place}")

    async def run(self) -> None:
        self._reach("start")
        await super().run()

    def create(self, order: CreatePool) -> None:
        self._reach("create")
        super().create(order)

    def attach(self, ready: PoolReady, fd: int) -> None:
        self._reach("attach")
        super().attach(ready, fd)

    def detach(self) -> None:
        if self.pool is not None:
            self._reach("detach")
        super().detach()

    def _make_host_pool(self, layout: KVLayout, blocks: int) -> KVPool:
        self._reach("tiers")
        return super()._make_host_pool(layout, blocks)

    def _layout(self, order: CreatePool) -> KVLayout:
        return super()._layout(order) if order.layout else KVLayout(**LAYOUT_FIELDS, block_size=self._config.worker.block_size)


if __name__ == "__main__":
    sys.exit(cache.main(FakeCache))
