"""Orders of administrators (pause, sleep, wake, weights): each is a task of the server, with a number.

route    starts the order and waits for it for a while .. answers with the result, or 202 with its number
order    runs to its end even when the client leaves: a half-done order would leave an engine that serves no requests
GET /v1/orders   states and errors of the last orders
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
"""Kinds of which only one order may run at a time: two would undo each other halfway."""

OrderState = Literal["running", "done", "failed"]


class Order:
    __slots__ = ("kind", "number", "task", "unattended")

    def __init__(self, number: int, kind: str, task: asyncio.Task[None]) -> None:
        self.number = number
        self.kind = kind
        self.task = task
        self.unattended = False
        "Whether the route has answered 202 and waits no longer, so that the order's end is logged."

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
        """Starts `work` as an order and returns when it is done, or after `seconds` while it still runs. Raises the order's
        error."""
        try:
            self._require_room(kind)
        except ApiError:
            work.close()
            raise
        order = Order(next(self._numbers), kind, asyncio.create_task(work))
        self._orders[order.number] = order
        order.task.add_done_callback(lambda _: self._ended(order))
        await asyncio.wait([order.task], timeout=seconds)  # never cancels the order, even if the route is cancelled
        if order.task.done():
            order.task.result()
        else:
            order.unattended = True
        return order

    def view(self) -> list[dict[str, Any]]:
        """All remembered orders, newest first."""
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
        error = order.error  # reads the task's exception, so that asyncio does not warn about it
        if order.unattended:
            level = logging.WARNING if error else logging.INFO
            logger.log(level, "order %d (%s) is %s%s", order.number, order.kind, order.state, f": {error}" if error else "")
        for number in list(self._orders):
            if len(self._orders) <= KEPT_MAX:
                break
            if self._orders[number].state != "running":
                del self._orders[number]
