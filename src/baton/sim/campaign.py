"""A campaign: many seeds over many processes, and their sums.

A seed is one world and needs nothing from any other, so seeds go out in small chunks to spawned processes and come back as
bytes. Everything that is added up is an integer: the sums, and so the digest, are the same for any number of jobs and in any
order of arrival.

A campaign fails on a violation. A large one also fails if a state of `SOMETIMES` was hardly ever reached: a rehearsal that
does not come to the interesting places proves nothing by passing. So does one with enough seeds for every pair of fault kinds
(pairs.py) if two kinds never happened in one run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import combinations_with_replacement
from multiprocessing import get_context
from time import perf_counter, process_time

import msgspec
from msgspec import Struct, field

from baton.sim.outcome import Outcome
from baton.sim.pairs import pairs, seeds_for_pairs
from baton.sim.run import Kind, make, run
from baton.sim.sometimes import SOMETIMES

LARGE = 1_000
"""Seeds from which on a campaign must reach every state of SOMETIMES."""

CHUNK = 8
"""Seeds per chunk of a process: a fraction of a second, so that the bar moves and Ctrl-C does not wait."""

PAIR = " + "
"""Separator of two kinds of faults."""

Progress = Callable[[int, int], None]
"""Progress callback with (seeds done, violations so far), in the caller's thread."""


class Violation(Struct, frozen=True):
    seed: int
    invariant: int
    "The violated invariant in docs/internals/reliability.md; 0 for an exception of another kind."
    message: str


class Campaign(Struct, frozen=True):
    seeds: int
    requests: int
    events: int
    "Number of checked events, each at one process or client (world.py)."
    heap_events: int
    "Number of entries of the timeline alone."
    tokens: int
    virtual_seconds: float
    seconds: float
    "Elapsed seconds of the wall clock."
    cpu_seconds: float
    events_per_second: float
    "Events per CPU second, without the start of the processes."
    violations: list[Violation]
    sometimes: dict[str, int]
    "Number of seeds that reached each state."
    missing: list[str]
    "States of SOMETIMES that fewer than 0.1 % of the seeds reached."
    digest: str
    "Sum of the seeds' digests. One seed: its own digest."
    jobs: int = 1
    pairs: int = 0
    "Pairs of fault kinds that happened in the same run."
    pairs_missing: list[str] = []
    "Pairs of fault kinds that never happened in one run."
    pair_seeds: int = 0
    "Seeds from which on a campaign must reach every pair."
    interrupted: bool = False
    "Whether Ctrl-C ended the campaign: the numbers are of the seeds that were done by then."

    @property
    def ok(self) -> bool:
        if self.pairs_missing and self.seeds >= self.pair_seeds:
            return False
        return not self.violations and not (self.missing and self.seeds >= LARGE)


class SeedTotals(Struct):
    """Sums over a few seeds, as a process returns them. Seconds are nanoseconds, because sums of floats depend on the order."""

    seeds: int = 0
    requests: int = 0
    events: int = 0
    heap_events: int = 0
    tokens: int = 0
    virtual_ns: int = 0
    cpu_ns: int = 0
    digest: bytes = bytes(16)
    violations: list[Violation] = field(default_factory=list)
    sometimes: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, int] = field(default_factory=dict)
    "Number of seeds in which both kinds of faults happened; a kind with itself is the kind alone."
    kind: Kind = "instance"
    "Kind of the scenarios. Each kind has its own rare states."

    def add(self, other: SeedTotals) -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.events += other.events
        self.heap_events += other.heap_events
        self.tokens += other.tokens
        self.virtual_ns += other.virtual_ns
        self.cpu_ns += other.cpu_ns
        self.digest = _sum(self.digest, other.digest)
        self.violations += other.violations
        for name, seeds in other.sometimes.items():
            self.sometimes[name] = self.sometimes.get(name, 0) + seeds
        for pair, seeds in other.pairs.items():
            self.pairs[pair] = self.pairs.get(pair, 0) + seeds

    def _never_met(self) -> list[str]:
        return [pair for pair in map(PAIR.join, pairs(self.kind)) if pair not in self.pairs]

    @property
    def _declared(self) -> tuple[str, ...]:
        return SOMETIMES[self.kind]

    def campaign(self, seconds: float, jobs: int, interrupted: bool = False) -> Campaign:
        return Campaign(
            seeds=self.seeds,
            requests=self.requests,
            events=self.events,
            heap_events=self.heap_events,
            tokens=self.tokens,
            virtual_seconds=self.virtual_ns / 1e9,
            seconds=seconds,
            cpu_seconds=self.cpu_ns / 1e9,
            events_per_second=self.events / (self.cpu_ns / 1e9) if self.cpu_ns else 0.0,
            violations=sorted(self.violations, key=lambda violation: violation.seed),
            sometimes=_in_declared_order(self.sometimes, self._declared),
            missing=[name for name in self._declared if 1_000 * self.sometimes.get(name, 0) < self.seeds],
            digest=self.digest.hex(),
            jobs=jobs,
            pairs=sum(one != other for one, other in map(_kinds_of, self.pairs)),
            pairs_missing=self._never_met(),
            pair_seeds=max(LARGE, seeds_for_pairs(self.kind)),
            interrupted=interrupted,
        )


def check_seed(seed: int, kind: Kind = "instance") -> Outcome:
    """Generate and run a seed. A scenario that cannot be built is a violation too: the other seeds still run."""
    try:
        return run(make(seed, kind))
    except Exception as error:
        message = f"no world: {type(error).__name__}: {error}"
        return Outcome(seed, 0, 0, 0, 0.0, "0" * 32, {}, invariant=0, violation=message)


def part_of(outcome: Outcome, cpu_seconds: float = 0.0, kind: Kind = "instance") -> SeedTotals:
    """An outcome as the smallest part of a campaign."""
    return SeedTotals(
        seeds=1,
        requests=outcome.requests,
        events=outcome.events,
        heap_events=outcome.heap_events,
        tokens=outcome.tokens,
        virtual_ns=round(outcome.virtual_seconds * 1e9),
        cpu_ns=round(cpu_seconds * 1e9),
        digest=bytes.fromhex(outcome.digest),
        violations=violations_of(outcome),
        sometimes=dict.fromkeys(outcome.sometimes, 1),
        pairs=dict.fromkeys(map(PAIR.join, combinations_with_replacement(outcome.faults, 2)), 1),
        kind=kind,
    )


def violations_of(outcome: Outcome) -> list[Violation]:
    return [] if outcome.invariant is None else [Violation(outcome.seed, outcome.invariant, outcome.violation)]


def run_campaign(seeds: range, jobs: int | None = None, progress: Progress | None = None, kind: Kind = "instance") -> Campaign:
    """Run the seeds in `jobs` processes (None: one a core). On Ctrl-C: returns the sums so far, and no process is left."""
    begin = perf_counter()
    total, interrupted = SeedTotals(kind=kind), False
    chunks = [seeds[place : place + CHUNK] for place in range(0, len(seeds), CHUNK)]
    jobs = max(1, min(jobs or cores(), len(chunks)))
    try:
        with closing(_parts(chunks, jobs, kind)) as parts:
            for part in parts:
                total.add(part)
                if progress is not None:
                    progress(total.seeds, len(total.violations))
    except KeyboardInterrupt:
        interrupted = True
    return total.campaign(perf_counter() - begin, jobs, interrupted)


def cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0))


# Processes


def _parts(chunks: Sequence[range], jobs: int, kind: Kind) -> Generator[SeedTotals]:
    """Yield the chunks' sums, in the order of completion. One job needs no process of its own."""
    if jobs == 1:
        for chunk in chunks:
            yield _run_chunk(chunk, kind)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    running: set[Future[bytes]] = set()
    left = iter(chunks)
    try:
        while True:
            for _, chunk in zip(range(2 * jobs - len(running)), left, strict=False):
                running.add(_submit(pool, chunk, kind))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield msgspec.msgpack.decode(future.result(), type=SeedTotals)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: range, kind: Kind) -> Future[bytes]:
    with _no_interrupts():  # submitting may start a process
        return pool.submit(_send_chunk, chunk.start, chunk.stop, chunk.step, kind)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process started in here never sees Ctrl-C, which a terminal sends to the whole group: only the parent acts on it,
    and lets each process finish its chunk. A Ctrl-C that arrives in the parent meanwhile stays pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send_chunk(start: int, stop: int, step: int, kind: Kind = "instance") -> bytes:
    return msgspec.msgpack.encode(_run_chunk(range(start, stop, step), kind))


def _run_chunk(seeds: range, kind: Kind) -> SeedTotals:
    """Run a chunk of seeds. CPU time is taken around the seeds, so that loading the modules is not counted."""
    total = SeedTotals()
    begin = process_time()
    for seed in seeds:
        total.add(part_of(check_seed(seed, kind)))
    total.cpu_ns = round((process_time() - begin) * 1e9)
    return total


# Sums


def _kinds_of(pair: str) -> tuple[str, str]:
    one, _, other = pair.partition(PAIR)
    return one, other


def _sum(one: bytes, other: bytes) -> bytes:
    """Sum of two digests: addition does not depend on the order of the seeds."""
    return (int.from_bytes(one) + int.from_bytes(other) & (1 << 128) - 1).to_bytes(16)


def _in_declared_order(reached: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """Numbers of all declared states, reached or not, and then of the undeclared ones."""
    declared = {name: reached.get(name, 0) for name in names}
    return declared | {name: reached[name] for name in sorted(reached) if name not in declared}
