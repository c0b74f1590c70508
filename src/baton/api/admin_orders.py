"""Orders of administrators (pause, sleep, wake, weights): each is a task of the server, with a number.

route    begins the order, and waits for it for a while .. answers with its end, or 202 with its number
order    goes on, whoever waits for it: an order that is broken off halfway would leave an engine that serves nobody
GET /v1/orders   what became of the last ones
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from itertools import count
from typing import Any, Final, Literal

from baton.api.errors import ApiError

logger = logging.getLogger("baton.api")

KEPT_MAX: Final = 100
UNDER_WAY_MAX: Final = 32
CHANGES_WEIGHTS: Final = ("sleep", "wake", "weights")
"""One of these at a time: two would undo each other halfway."""

OrderState = Literal["running", "done", "failed"]


class Order:
    __slots__ = ("kind", "number", "task", "unattended")

    def __init__(self, number: int, kind: str, task: asyncio.Task[None]) -> None:
        self.number = number
        self.kind = kind
        self.task = task
        self.unattended = False
        "Its route has answered that it goes on."

    @property
    def state(self) -> OrderState:
        if not self.task.done():
            return "running"
        return "failed" if self.error else "done"

    @property
    def error(self) -> str:
        if not self.task.done():
            return ""
        if self.task.cancelled():
            return "the server ended"
        failed = self.task.exception()
        return "" if failed is None else str(failed) or type(failed).__name__

    def view(self) -> dict[str, Any]:
        return {"order": self.number, "kind": self.kind, "state": self.state, "error": self.error or None}


class AdminOrders:
    def __init__(self) -> None:
        self._numbers = count(1)
        self._orders: dict[int, Order] = {}

    async def run(self, kind: str, seconds: float, work: Coroutine[Any, Any, None]) -> Order:
        """Returns when the order is done, or after so many seconds with an order that goes on. Raises what it failed with."""
        try:
            self._require_room(kind)
        except ApiError:
            work.close()
            raise
        order = Order(next(self._numbers), kind, asyncio.create_task(work))
        self._orders[order.number] = order
        order.task.add_done_callback(lambda _: self._ended(order))
        await asyncio.wait([order.task], timeout=seconds)  # which leaves the order alone, also where the route is cancelled
        if order.task.done():
            order.task.result()
        else:
            order.unattended = True
        return order

    def view(self) -> list[dict[str, Any]]:
        """The newest first."""
        return [order.view() for order in reversed(self._orders.values())]

    def _require_room(self, kind: str) -> None:
        running = [order for order in self._orders.values() if order.state == "running"]
        for order in running:
            if kind in CHANGES_WEIGHTS and order.kind in CHANGES_WEIGHTS:
                text = f"order {order.number} ({order.kind}) is under way: wait for its end (GET /v1/orders)"
                raise ApiError(409, text, code="order_under_way")
        if len(running) >= UNDER_WAY_MAX:
            raise ApiError(503, f"{len(running)} orders are under way already", code="too_many_orders")

    def _ended(self, order: Order) -> None:
        error = order.error  # and so nobody complains that it was not asked for
        if order.unattended:
            level = logging.WARNING if error else logging.INFO
            logger.log(level, "order %d (%s) is %s%s", order.number, order.kind, order.state, f": {error}" if error else "")
        for number in list(self._orders):
            if len(self._orders) <= KEPT_MAX:
                break
            if self._orders[number].state != "running":
                del self._orders[number]
