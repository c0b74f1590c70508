"""How well routers find cached prefixes in a large fleet: `python bench/fleet.py`. Virtual time, minutes on one core.

The router machine is the real one (events in, effects out), and every instance has the real prefix cache, block pool and digest
feed. Instead of an engine, an instance has service times: prompts are computed one after the other, a fixed time per uncached
token, and every token of an answer takes a fixed time. Messages arrive at once and nothing fails. Heartbeats, with the digests
after them, arrive every 0.25 s, early ones (core/heartbeat_times.py) without digests. Traffic: fleet_traffic.py.

    oracle     perfect knowledge of all caches: every block is in the router's index at the instant of its insertion or
               eviction, and depths are exact to the block instead of to the last mark. The load rule, the heartbeats and the
               router's own guesses (what was sent and is not computed yet) are those of the router
    digests    what routers do: marked blocks, published after heartbeats
    2 routers  the same with two routers; requests go to either by chance, and the other one gets an early heartbeat
    guesses    instances publish nothing: each of the two routers knows its own sends
    load       one router that ignores prefixes

`found`: cached tokens by the tokens of all prompts, without the first half of the requests; `could be`: the same for one cache
of unlimited size. `digest`: bytes of CachedKeys frames, of all sessions, by the bytes of the frames that carry tokens: prompts
(GenerateRequest) and answers (Emit), and by those of answers alone. An Emit is counted with 64 rows per frame: smaller batches
need more bytes per token. Token ids are below 150,000. What is evicted depends on every choice before, so the same traffic
finds several percent more or less when heartbeats come at other moments: `--runs` repeats each row with other moments, sums the
counts, and shows the standard error of `found` as `+-`. The last line is the memory of a router process whose index is full.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import stdev
from time import process_time
from unittest.mock import patch

import fleet_traffic
from baton.config import KVConfig, RouterConfig
from baton.core.cluster import placement
from baton.core.cluster.events import (
    ClusterEvent,
    Deliver,
    InstanceJoined,
    InstanceMessage,
    RouterTick,
    RunPass,
    SchedulePass,
    SendToInstance,
    Session,
    SubmitRequest,
    WarnOfInstance,
)
from baton.core.cluster.prefix_index import PrefixIndex
from baton.core.cluster.router import Router
from baton.core.heartbeat_times import HeartbeatTimes
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.digest import CacheDigest, DigestFeed
from baton.core.kv.eviction import lru
from baton.core.kv.marks import KEY_BYTES, Mark, marks_of
from baton.core.kv.prefix_cache import PrefixCache
from baton.protocol.codec import encode
from baton.protocol.ids import BlockId, BlockKey, Instant, RequestId
from baton.protocol.instance import Heartbeat
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams
from baton.protocol.versions import CACHED_KEYS
from fleet_size import BLOCKS, SLOTS, hello_of, memory, token_bytes
from fleet_traffic import SIZE, Arrival

BEAT = 0.25
TOKEN_SECONDS = 0.0005
"""Of a prompt."""
STEP_SECONDS = 0.04
"""For every token of an answer."""
MODES = ("oracle", "digests", "2 routers", "guesses", "load")
TWO = ("2 routers", "guesses")
RATES = {"conversation": 0.04, "tenants": 0.4, "short": 8.0}
"""Requests per second and instance."""
REQUESTS = {"conversation": 15, "tenants": 60, "short": 2400}
"""Requests per instance."""


class Run:
    """One request at its instance."""

    __slots__ = ("arrival", "cached", "home", "id", "measured", "table")

    def __init__(self, arrival: Arrival, home: int, number: int, *, measured: bool) -> None:
        self.arrival = arrival
        self.home = home
        "Its router."
        self.id = RequestId(f"r{number}")
        self.measured = measured
        self.cached = 0
        self.table: list[BlockId] = []


class KnownHasher(BlockHasher):
    """Keys of prompts that were drawn with the traffic. Every token of a prompt is the number of its request."""

    def __init__(self, keys: dict[int, list[BlockKey]]) -> None:
        super().__init__(b"m", SIZE)
        self._keys = keys

    def extend(
        self, keys: list[BlockKey], root: BlockKey, tokens: Sequence[int], blocks: int, extras: Sequence[object] = ()
    ) -> None:
        keys += self._keys[tokens[0]][len(keys) : blocks]


class OracleCache(PrefixCache):
    """Every change is in the router's index at once."""

    __slots__ = ("_index", "_number")

    def __init__(self, pool: BlockPool, index: PrefixIndex, number: int) -> None:
        super().__init__(pool, lru)
        self._index, self._number = index, number

    def insert(self, key: BlockKey, parent: BlockId, block: BlockId) -> BlockId:
        first = super().insert(key, parent, block)
        if first == block and self.key_of(block) == key:
            self._index.publish(self._number, whole=False, added=(short_key(key),), removed=())
        return first

    def _forget(self, block: BlockId) -> None:
        key = self.key_of(block)
        assert key is not None
        super()._forget(block)
        self._index.publish(self._number, whole=False, added=(), removed=(short_key(key),))


def short_key(key: BlockKey) -> int:
    return int.from_bytes(key[:KEY_BYTES])


def every_mark(keys: Sequence[BlockKey]) -> list[Mark]:
    """An oracle knows every block."""
    return [(place, short_key(key)) for place, key in enumerate(keys, 1)]


class Instance:
    """Service times around a real cache."""

    def __init__(
        self, number: int, cache: PrefixCache, routers: int, after: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self.number = number
        self.cache = cache
        self.queue: deque[Run] = deque()
        self.slots = SLOTS
        self.uncached = 0
        "Prompt tokens that are not computed."
        self.free_at = 0.0
        self.feeds: list[DigestFeed] = []
        self.beats = [HeartbeatTimes(0.0, BEAT) for _ in range(routers)]
        "Of the session with each router."
        self._after = after

    def beat(self) -> Heartbeat:
        return Heartbeat("", TOKEN_SECONDS, self.cache.available, self.slots, self.uncached, SLOTS - self.slots)

    def submit(self, run: Run, now: float, fleet: Fleet) -> None:
        self.queue.append(run)
        self.uncached += run.arrival.tokens
        self.admit(now, fleet)

    def admit(self, now: float, fleet: Fleet) -> None:
        """Admit requests in order, as far as there is room."""
        while self.queue and self.slots:
            run, cache = self.queue[0], self.cache
            tokens, output, keys = run.arrival[1:]
            hit = cache.match(keys, (tokens - 1) // SIZE)
            more = -(-(tokens + output - 1) // SIZE) - hit
            if cache.available - cache.idle_among(keys, hit) < more:
                return
            self.queue.popleft()
            run.table = cache.acquire(keys[:hit]) + cache.take(more)
            run.cached = hit * SIZE
            fleet.counts.found += run.cached * run.measured
            self.slots -= 1
            self.uncached -= run.cached
            self.free_at = max(now, self.free_at) + (tokens - run.cached) * TOKEN_SECONDS
            self._after(self.free_at, partial(fleet.prefilled, self, run))

    def publish(self, run: Run, begin: int, end: int) -> None:
        for place in range(begin, end):
            self.cache.publish(run.arrival.keys, run.table, place)


class Counts:
    """Figures of one run."""

    def __init__(self) -> None:
        self.tokens = self.found = self.could_be = 0
        self.digest_bytes = self.prompts = self.answers = 0
        self.rejected = self.warned = self.cut = self.most_keys = self.waits = self.early = 0


class Fleet:
    def __init__(self, mode: str, instances: int, seed: int = 1, keys_max: int = RouterConfig().prefix_keys_max) -> None:
        self.mode, self.rng = mode, Random(seed)
        self.now, self.counts, self.number = 0.0, Counts(), count()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.runs: dict[RequestId, Run] = {}
        self.keys: dict[int, list[BlockKey]] = {}
        oracle = mode == "oracle"
        config = RouterConfig(
            policy="load" if mode == "load" else "prefix",
            instances_max=max(instances, 1),
            requests_open_max=10**6,
            queue_requests_max=10**6,
            queue_tokens_max=2**31 - 1,
            prefix_keys_max=10**7 if oracle else keys_max,
        )
        self.routers = [Router(config) for _ in range(2 if mode in TWO else 1)]
        capabilities = () if mode in ("guesses", "load") else (CACHED_KEYS,)
        self.instances: list[Instance] = []
        for number in range(instances):
            hello = hello_of(number, capabilities)
            for router in self.routers:
                router.handle(InstanceJoined(Session(number), hello), Instant(0.0))
            self.instances.append(self._instance(number, publishes=bool(capabilities)))
            self.after(self.rng.random() * BEAT, partial(self.beat, number))
        for router in self.routers:
            router._placement._hasher = KnownHasher(self.keys)

    def _instance(self, number: int, *, publishes: bool) -> Instance:
        pool = BlockPool(BLOCKS)
        if self.mode == "oracle":
            membership = self.routers[0].membership
            return Instance(number, OracleCache(pool, membership.index, membership.names[f"i{number}"].number), 1, self.after)
        instance = Instance(number, PrefixCache(pool, lru), len(self.routers), self.after)
        if publishes:
            digest = instance.cache.digest = CacheDigest(KVConfig().digest_changes_max)
            instance.feeds = [DigestFeed(digest) for _ in self.routers]
        return instance

    # Events

    def after(self, at: float, act: Callable[[], None]) -> None:
        heappush(self.heap, (at, next(self.number), act))

    def dispatch(self, home: int, event: ClusterEvent) -> None:
        router = self.routers[home]
        for effect in router.handle(event, Instant(self.now)):
            match effect:
                case SchedulePass():
                    self.dispatch(home, RunPass())
                case SendToInstance(session, GenerateRequest() as request):
                    self.instances[session].submit(self.runs[request.id], self.now, self)
                    self.beat_early(session, home)
                case WarnOfInstance():
                    self.counts.warned += 1
                case Deliver():
                    pass
                case _:
                    self.counts.rejected += 1

    def beat(self, number: int) -> None:
        instance = self.instances[number]
        beat = instance.beat()
        self.counts.waits += len(instance.queue)
        for home in range(len(self.routers)):
            self.dispatch(home, InstanceMessage(Session(number), beat))
            instance.beats[home].on_sent(self.now)
            if instance.feeds and (cached := instance.feeds[home].next()) is not None:
                self.counts.digest_bytes += len(encode(cached))
                self.dispatch(home, InstanceMessage(Session(number), cached))
        if instance.cache.digest is not None:
            self.counts.most_keys = max(self.counts.most_keys, len(instance.cache.digest))
        self.after(self.now + BEAT, partial(self.beat, number))

    def beat_early(self, session: Session, home: int) -> None:
        """The instance has a request of a router: the others get a heartbeat soon (core/heartbeat_times.py)."""
        instance = self.instances[session]
        for other, beats in enumerate(instance.beats):
            if other != home and beats.early_due is None:
                beats.on_request_of_another(self.now)
                if beats.early_due is not None:
                    self.after(beats.early_due, partial(self.send_early, instance, other))

    def send_early(self, instance: Instance, home: int) -> None:
        beats = instance.beats[home]
        if beats.early_due is not None and beats.early_due <= self.now:
            beats.on_sent(self.now, early=True)
            self.counts.early += 1
            self.dispatch(home, InstanceMessage(Session(instance.number), instance.beat()))

    def arrive(self, number: int, arrival: Arrival, *, measured: bool) -> None:
        run = Run(arrival, self.rng.randrange(len(self.routers)), number, measured=measured)
        self.runs[run.id], self.keys[number] = run, arrival.keys
        counts = self.counts
        counts.prompts += arrival.tokens
        counts.answers += arrival.output
        counts.tokens += arrival.tokens * measured
        sampling = SamplingParams(max_tokens=arrival.output)
        self.dispatch(run.home, SubmitRequest(GenerateRequest(id=run.id, prompt=(number,) * arrival.tokens, sampling=sampling)))

    def prefilled(self, instance: Instance, run: Run) -> None:
        tokens, output = run.arrival.tokens, run.arrival.output
        instance.uncached -= tokens - run.cached
        instance.publish(run, run.cached // SIZE, tokens // SIZE)
        self.emit(instance, run, Emit([(run.id, 1, 0, 0, 1)], []) if output > 1 else self._end(run, 0))
        self.after(self.now + (output - 1) * STEP_SECONDS, partial(self.finished, instance, run))

    def finished(self, instance: Instance, run: Run) -> None:
        tokens, output = run.arrival.tokens, run.arrival.output
        instance.publish(run, tokens // SIZE, (tokens + output - 1) // SIZE)
        instance.cache.release(run.table)
        instance.slots += 1
        if output > 1:
            self.emit(instance, run, self._end(run, 1))
        del self.runs[run.id], self.keys[int(run.id[1:])]
        instance.admit(self.now, self)

    def _end(self, run: Run, begin: int) -> Emit:
        tokens, output = run.arrival.tokens, run.arrival.output
        ended = Ended(run.id, 0, FinishReason.LENGTH, tokens, run.cached, output, 0)
        return Emit([(run.id, 1, 0, begin, [1] * (output - begin))], [ended])

    def emit(self, instance: Instance, run: Run, emit: Emit) -> None:
        self.dispatch(run.home, InstanceMessage(Session(instance.number), emit))

    # The run

    def run(self, traffic: Iterator[Arrival], requests: int) -> Counts:
        seen: set[BlockKey] = set()
        tick = 0.0
        for number, arrival in enumerate(islice(traffic, requests)):
            while self.heap[0][0] <= arrival.at:
                self.now, _, act = heappop(self.heap)
                act()
                if self.now >= tick:
                    tick = self.now + BEAT
                    for home in range(len(self.routers)):
                        self.dispatch(home, RouterTick())
            self.now = arrival.at
            measured = number >= requests // 2
            self._note_possible(seen, arrival, measured=measured)
            self.arrive(number, arrival, measured=measured)
        self.counts.cut = sum(router.membership.index.cut for router in self.routers)
        return self.counts

    def _note_possible(self, seen: set[BlockKey], arrival: Arrival, *, measured: bool) -> None:
        most = (arrival.tokens - 1) // SIZE
        hit = next((place for place in range(most) if arrival.keys[place] not in seen), most)
        self.counts.could_be += hit * SIZE * measured
        seen.update(arrival.keys[hit : (arrival.tokens + arrival.output - 1) // SIZE])


# The table


def traffic_of(name: str, rng: Random, rate: float, path: Path | None) -> Iterator[Arrival]:
    if path is not None:
        return fleet_traffic.trace(rng, rate, path)
    return {"conversation": fleet_traffic.conversation, "tenants": fleet_traffic.tenants, "short": fleet_traffic.short}[name](
        rng, rate
    )


def measure(
    name: str, mode: str, instances: int, requests: int, rate: float, keys_max: int, path: Path | None, run: int
) -> tuple[Counts, float]:
    """One run of a row of the table, in a process of its own. Returns also its CPU seconds."""
    begin = process_time()
    with patch.object(placement, "marks_of", every_mark if mode == "oracle" else marks_of):
        traffic = traffic_of(name, Random(2), rate * instances, path)
        counts = Fleet(mode, instances, run + 1, keys_max).run(traffic, requests)
    return counts, process_time() - begin


def summed(runs: Sequence[Counts]) -> tuple[Counts, float]:
    """The sums of the runs, and the standard error of the share that was found."""
    total = Counts()
    for counts in runs:
        for name, value in vars(counts).items():
            setattr(total, name, max(total.most_keys, value) if name == "most_keys" else getattr(total, name) + value)
    shares = [counts.found / max(1, counts.tokens) for counts in runs]
    return total, stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0


def show(name: str, mode: str, counts: Counts, error: float, seconds: float, best: float) -> float:
    """Print a row and return its hit rate. `best`: that of the first row of this traffic. 0: this is the first row."""
    per_token, found = token_bytes(), counts.found / max(1, counts.tokens)
    answers = counts.answers * per_token.answer
    both = answers + counts.prompts * per_token.prompt
    print(
        f"{name:<13} {mode:<10} {found:7.2%} {error:6.2%} {counts.could_be / max(1, counts.tokens):9.2%} "
        f"{found / (best or found or 1):10.1%} {counts.digest_bytes / both:9.3%} {counts.digest_bytes / answers:10.2%} "
        f"{counts.most_keys:10,} {counts.cut:9,} {counts.warned:6} {counts.rejected:8} {seconds:6.0f}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=int, help="all of them; by default a number per instance")
    parser.add_argument("--traffic", nargs="+", default=["conversation", "tenants"], choices=list(RATES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--jobs", type=int, default=1, help="rows that are computed at the same time")
    parser.add_argument("--runs", type=int, default=1, help="runs of each row, with heartbeats at other moments")
    parser.add_argument("--rate", type=float, help="requests per second and instance")
    parser.add_argument("--keys", type=int, default=RouterConfig().prefix_keys_max, help="prefix_keys_max of the routers")
    parser.add_argument("--trace", type=Path, help="instead of generated traffic: a file in the format of Mooncake's traces")
    options = parser.parse_args()
    print(
        f"{'traffic':<13} {'':<10} {'found':>7} {'+-':>6} {'could be':>9} {'of oracle':>10} {'digest':>9} {'of answers':>10} "
        f"{'keys, most':>10} {'cut':>9} {'warned':>6} {'rejected':>8} {'CPU s':>6}"
    )
    rows = []
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:  # each row's memory is freed with its process
        for name in ["trace"] if options.trace else options.traffic:
            requests = options.requests or REQUESTS.get(name, 10**9) * options.instances
            rate = options.rate or RATES.get(name, RATES["conversation"])
            for mode in options.modes:
                given = (name, mode, options.instances, requests, rate, options.keys, options.trace)
                rows.append((name, mode, [pool.apply_async(measure, (*given, run)) for run in range(options.runs)]))
        full = pool.apply_async(memory, (options.instances, options.keys))
        best: dict[str, float] = {}
        for name, mode, row in rows:
            runs = [run.get() for run in row]
            counts, error = summed([counts for counts, _ in runs])
            found = show(name, mode, counts, error, sum(seconds for _, seconds in runs), best.get(name, 0.0))
            best.setdefault(name, found)
        entries, mebibytes = full.get()
        print(f"a router with {entries:,} entries of {options.instances:,} instances: {mebibytes:,.0f} MiB")


if __name__ == "__main__":
    main()
