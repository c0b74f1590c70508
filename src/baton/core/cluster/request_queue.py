"""The router's queue: ordered by priority, then arrival. A request that comes back is at its old place.

Bounded in sequences and prompt tokens, for new requests. A request that comes back is never rejected; it counts, so that new
requests are rejected meanwhile.

Requests are in lanes, so that a placement pass need not visit all of them:

    by usable instances       those in one lane could use the same instances: where the first finds no room, none does
    waiting for a prefill     visited when a prefill or mixed instance has room, or a decode instance that has so much of
    instance                  their prefix that it needs no other: of those with the same prefix one per pass
    parked                    for a time, or until other instances are usable
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import Order
from baton.core.cluster.handoff_table import RequestState
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.ids import Instant
from baton.protocol.request import GenerateRequest, Refused

STALE_MAX: Final = 64
"""Least number of stale entries, in heaps and waiters, before they are removed."""
WOKEN_MAX: Final = 64
"""Number of requests with different prefixes that a pass visits because a decode instance with room has their prefix."""


class QueueLane(NamedTuple):
    kind: Literal["whole", "one token", "prefill"]
    size: int
    "The capacity of the smallest instance that could hold these requests."
    prompt_size: int = 0
    "The capacity of the smallest instance that could hold their prompts, if they wait for a prefill instance."


class RequestQueue:
    __slots__ = (
        "_cached",
        "_config",
        "_lane_of",
        "_lanes",
        "_parked",
        "_routed",
        "_sizes",
        "_waiters",
        "_waits",
        "sequences",
        "tokens",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._routed: dict[Order, RoutedRequest] = {}
        "Requests by their order, which is unique."
        self._lanes: dict[QueueLane, list[Order]] = {}
        "Heaps of requests by lane. Entries may name requests that have left, or are in another lane now."
        self._lane_of: dict[Order, QueueLane | None] = {}
        "Lane of each request by its order. None: parked."
        self._parked: dict[Order, Instant | None] = {}
        "Parked requests, and when they are visited again. None: when other instances are usable."
        self._waiters: dict[int, list[Order]] = {}
        "Requests that wait for a prefill instance, by the block with which a decode instance needs none. Heaps, as `_lanes`."
        self._waits = 0
        "Number of entries in the heaps of waiters."
        self._cached: dict[int, None] = {}
        "Keys of `_waiters` that some decode instance has, or had."
        self._sizes: list[int] = []
        "Capacities of the usable instances."
        self.sequences = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._routed)

    def routed_requests(self) -> list[RoutedRequest]:
        return list(self._routed.values())

    def refusal(self, request: GenerateRequest) -> Refused | None:
        """The reason why there is no room for a new request. None: there is room."""
        config = self._config
        sequences = len(request.wanted)
        tokens = sequences * len(request.prompt)
        if sequences > config.queue_requests_max:
            return Refused("never_queued", sequences, config.queue_requests_max)
        if tokens > config.queue_tokens_max:
            return Refused("never_queued", tokens, config.queue_tokens_max)
        if self.sequences + sequences > config.queue_requests_max:
            return Refused("queue_full", self.sequences + sequences, config.queue_requests_max)
        if self.tokens + tokens > config.queue_tokens_max:
            return Refused("queue_tokens_full", self.tokens + tokens, config.queue_tokens_max)
        return None

    # Members

    def join(self, routed: RoutedRequest) -> None:
        self._routed[routed.order] = routed
        self._count(routed, 1)
        self._put(routed)

    def leave(self, routed: RoutedRequest) -> None:
        """Remove a request. Its entries in heaps are skipped from now on, and removed when they are too many."""
        del self._routed[routed.order]
        del self._lane_of[routed.order]
        self._parked.pop(routed.order, None)
        self._count(routed, -1)
        self._sweep()

    def resize(self, routed: RoutedRequest, sequences: int) -> None:
        """Subtract `sequences` that have ended while the request waits."""
        self.sequences -= sequences
        self.tokens -= sequences * len(routed.request.prompt)

    def _count(self, routed: RoutedRequest, sign: int) -> None:
        self.sequences += sign * len(routed.open)
        self.tokens += sign * len(routed.open) * len(routed.request.prompt)

    # Lanes

    def _put(self, routed: RoutedRequest, kind: Literal["prefill"] | None = None) -> None:
        size = self._size_for(routed.tokens_max)
        if kind == "prefill":
            lane = QueueLane(kind, size, self._size_for(routed.tokens + 1))
        else:
            lane = QueueLane("one token" if routed.tokens_left <= 1 else "whole", size)
        self._lane_of[routed.order] = lane
        heappush(self._lanes.setdefault(lane, []), routed.order)

    def _size_for(self, tokens: int) -> int:
        """The capacity of the smallest usable instance that could hold this many tokens."""
        place = bisect_left(self._sizes, tokens)
        return self._sizes[place] if place < len(self._sizes) else 2**62

    def lanes(self, *, prefill: bool) -> list[QueueLane]:
        """Lanes with requests. `prefill`: also the lanes of requests that wait for a prefill instance."""
        return [lane for lane in list(self._lanes) if (prefill or lane.kind != "prefill") and self.head(lane) is not None]

    def head(self, lane: QueueLane) -> RoutedRequest | None:
        heap = self._lanes.get(lane)
        while heap:
            if self._lane_of.get(heap[0]) == lane:
                return self._routed[heap[0]]
            heappop(heap)
        self._lanes.pop(lane, None)
        return None

    def set_aside(self, lane: QueueLane, routed: RoutedRequest) -> None:
        """Skip the head of the lane. Until `put_back` the request is in the queue, but not visited."""
        heap = self._lanes[lane]
        while heap and heap[0] == routed.order:
            heappop(heap)

    def put_back(self, lane: QueueLane, routed_requests: list[RoutedRequest]) -> None:
        for routed in routed_requests:
            if self._lane_of.get(routed.order) == lane:
                heappush(self._lanes.setdefault(lane, []), routed.order)

    def wait_for_prefill(self, routed: RoutedRequest, needed: int, is_cached: Callable[[int], bool]) -> None:
        """Let the request wait. `needed`: a decode instance with this many of its leading blocks needs no prefill instance.
        `is_cached`: whether one has the first mark from there on already, but had no room."""
        self._put(routed, "prefill")
        key = next((key for place, key in routed.marks if place >= needed), None) if needed > 0 else None
        if key is not None:
            heappush(self._waiters.setdefault(key, []), routed.order)
            self._waits += 1
            if is_cached(key):
                self._cached[key] = None

    def on_cached(self, keys: Sequence[int]) -> bool:
        """Record that a decode instance has these blocks from now on. True: a request waits for one of them."""
        found = [key for key in keys if key in self._waiters] if self._waiters else []
        self._cached.update(dict.fromkeys(found))
        return bool(found)

    def wake(self, has_room: Callable[[int], bool]) -> None:
        """Requeue the first waiter of each block whose holder has room (`has_room`). When it is placed, its blocks are cached
        once more (on_cached), and the next waiter follows."""
        woken: list[tuple[Order, int]] = []
        for key in list(self._cached):
            order = self._first_waiter(key)
            if order is None:
                del self._cached[key]
            elif has_room(key):
                woken.append((order, key))
        for order, key in sorted(woken)[:WOKEN_MAX]:
            heappop(self._waiters[key])
            self._waits -= 1
            self._put(self._routed[order])
            if self._first_waiter(key) is None:
                del self._cached[key]

    def _first_waiter(self, key: int) -> Order | None:
        heap = self._waiters.get(key, [])
        while heap:
            if self._is_waiter(heap[0]):
                return heap[0]
            heappop(heap)
            self._waits -= 1
        self._waiters.pop(key, None)
        return None

    # Parked requests

    def park(self, routed: RoutedRequest, until: Instant | None) -> None:
        self._lane_of[routed.order] = None
        self._parked[routed.order] = until

    def next_unpark(self) -> Instant | None:
        return min((until for until in self._parked.values() if until is not None), default=None)

    def unpark(self, now: Instant) -> None:
        """Return requests whose time has come to their lanes."""
        if self._parked:
            due = [order for order, until in self._parked.items() if until is not None and until <= now]
            self._reopen(due)

    def reopen(self, sizes: Iterable[int]) -> None:
        """Return all parked and waiting requests to their lanes: the usable instances have changed."""
        known, self._sizes = self._sizes, [*sizes]
        if self._sizes != known:
            self._reopen(list(self._routed))
            return
        self._reopen([order for order, lane in self._lane_of.items() if lane is None or lane.kind == "prefill"])

    def _reopen(self, orders: list[Order]) -> None:
        for order in orders:
            self._parked.pop(order, None)
            self._put(self._routed[order])
        self._sweep()

    def _sweep(self) -> None:
        """Limit heaps and waiters to twice as many entries as there are requests."""
        if sum(map(len, self._lanes.values())) > 2 * len(self._routed) + STALE_MAX:
            lanes: dict[QueueLane, list[Order]] = {}
            for order in sorted(self._routed):
                if (lane := self._lane_of[order]) is not None:
                    lanes.setdefault(lane, []).append(order)
            self._lanes = lanes
        if self._waits > 2 * len(self._routed) + STALE_MAX:  # a popular prefix may be one key with all of the entries
            waiting = {key: sorted(dict.fromkeys(filter(self._is_waiter, orders))) for key, orders in self._waiters.items()}
            self._waiters = {key: orders for key, orders in waiting.items() if orders}
            self._waits = sum(map(len, self._waiters.values()))
            self._cached = {key: None for key in self._cached if key in self._waiters}

    def _is_waiter(self, order: Order) -> bool:
        lane = self._lane_of.get(order)
        return lane is not None and lane.kind == "prefill"

    def check(self) -> list[str]:
        """Descriptions of all inconsistencies."""
        wrong = [f"{routed!r} is in the queue" for routed in self._routed.values() if routed.state is not RequestState.QUEUED]
        sequences = sum(len(routed.open) for routed in self._routed.values())
        tokens = sum(len(routed.open) * len(routed.request.prompt) for routed in self._routed.values())
        if (sequences, tokens) != (self.sequences, self.tokens):
            wrong.append(f"{sequences} sequences and {tokens} tokens wait, {self.sequences} and {self.tokens} are counted")
        first = sum(len(routed.open) for routed in self._routed.values() if routed.first)
        if first > self._config.queue_requests_max:
            wrong.append(f"{first} sequences wait")
        missing = [
            order for order, lane in self._lane_of.items() if lane is not None and order not in self._lanes.get(lane, ())
        ]
        parked = [order for order, lane in self._lane_of.items() if lane is None]
        if missing or sorted(parked) != sorted(self._parked) or len(self._lane_of) != len(self._routed):
            wrong.append(f"{len(missing)} requests are never looked at, {len(parked)} are parked")
        waits = sum(map(len, self._waiters.values()))
        if waits != self._waits:
            wrong.append(f"{waits} entries wait for a prefix, {self._waits} are counted")
        return wrong
