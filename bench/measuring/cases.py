"""One measurement of one engine. Every case gives a row of figures; which ones, says its docstring.

Offline cases speak to the engine's driver, which is loaded once and paused while others have their turn. Before each, a few
tokens are made, so that caches and clocks are warm again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from measuring import client, work
from measuring.engines import Engine, Place, start_server
from measuring.figures import decode_rate, full_steps, step_seconds
from measuring.machine import memory_mib
from measuring.processes import Driver, HttpServer, busy_neighbour

Figures = dict[str, Any]
Measure = Callable[[Driver, work.Sizes, tuple[int | str, ...]], Figures]


def warm(driver: Driver) -> None:
    driver.generate([work.prompt(16, "warm")], 8)


# Offline


def decode(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """One stream after its first token: tok/s, and the median step, whatever disturbed the others."""
    answer = driver.generate([work.prompt(sizes.decode_prompt, *place)], sizes.output + 1)
    return {"decode": decode_rate(answer["steps"]), "decode_step_ms": 1000 * step_seconds(answer["steps"], 1)}


def prefill(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """A long prompt and one new token: prompt tok/s."""
    prompts = work.alike(sizes.prefill_prompts, sizes.prefill, *place)
    return {"prefill": sizes.prefill / median(driver.generate([each], 1)["seconds"] for each in prompts)}


def batch(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """All requests at once: output tok/s, prompts included; and the steps in which all were decoding."""
    answer = driver.generate(work.batch(sizes.requests, *place), sizes.output)
    full = full_steps(answer["steps"], sizes.requests)
    alone = {"batch_decode": sizes.requests / median(full)} if len(full) > 2 else {}
    return {"batch": sizes.requests * sizes.output / answer["seconds"], **alone}


def batch_as_served(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """The same requests, as many at once as there are HTTP clients: what the server is compared with. Baton only."""
    driver.generate([work.prompt(16, "warm")], 8, slots=sizes.clients)
    answer = driver.generate(work.batch(sizes.requests, *place), sizes.output, slots=sizes.clients)
    return {"batch_as_served": sizes.requests * sizes.output / answer["seconds"]}


def neighbour(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """The share of its speed that is left beside a process that never waits: one stream, and a batch."""
    steps, found = 2 * sizes.neighbour_output, {}

    def one(what: str) -> float:
        return decode_rate(driver.generate([work.prompt(sizes.decode_prompt, *place, what)], steps)["steps"])

    def many(what: str) -> float:
        prompts = work.batch(sizes.neighbour_requests, *place, what)
        return 1 / float(driver.generate(prompts, sizes.neighbour_output)["seconds"])

    for name, speed in (("decode", one), ("batch", many)):
        alone = speed("alone")
        with busy_neighbour():
            found[f"neighbour_{name}"] = speed("beside") / alone
    return found


def growth(driver: Driver, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """µs an output token: with more and more sequences of one context running, and one stream with more and more context.

    The whole curve several times over, and of each point the median: a machine changes its speed on the way."""
    running = [(count, length) for length in sizes.growth_prompts for count in sizes.growth_running]
    points = list(dict.fromkeys([*running, *((1, length) for length in sizes.growth_contexts)]))

    def step(count: int, length: int, sweep: int) -> float:
        prompts = work.alike(count, length, *place, count, length, sweep)
        # The first sequences decode while the last are still read: there must be steps left in which all do.
        output = sizes.growth_output + count * length // 512
        return 1e6 * step_seconds(driver.generate(prompts, output)["steps"], count)

    sweeps = [{point: step(*point, sweep) for point in points} for sweep in range(sizes.growth_sweeps)]
    cost = {point: median(sweep[point] for sweep in sweeps) for point in points}
    return {
        "growth_running": {at: [(n, cost[n, at] / n) for n in sizes.growth_running] for at in sizes.growth_prompts},
        "growth_context": [(at + sizes.growth_output // 2, cost[1, at]) for at in sizes.growth_contexts],
    }


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    measure: Measure
    ours_only: bool = False
    once: bool = False
    "Not in every round."
    peers_once: tuple[str, ...] = ()
    "Of the peers only these, and only in the first round: the case is slow with them, and no goal compares it."

    def suits(self, engine: Engine, round_number: int) -> bool:
        if round_number and (self.once or engine.reference):
            return False
        if engine.ours:
            return not ((self.once or self.peers_once) and engine.reference)
        return not self.ours_only and (not self.peers_once or (engine.name in self.peers_once and not round_number))


OFFLINE = (
    Case("decode", decode),
    Case("prefill", prefill),
    Case("batch", batch),
    Case("batch_as_served", batch_as_served, ours_only=True),
    Case("neighbour", neighbour, peers_once=("llamacpp-q8_0",)),
    Case("growth", growth, once=True, ours_only=True),
)


# Served


def http(server: HttpServer, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """The requests of `batch` from a few streaming clients: output tok/s, TTFT, ITL."""
    found = client.load(server.port, "model", work.batch(sizes.requests, *place), sizes.output, sizes.clients)
    return {
        "http": found.output_rate,
        "http_ttft_ms": found.ttft_mean,
        "http_itl_ms": found.itl_mean,
        "http_itl_p99_ms": found.itl_p99,
    }


def ready_server(engine: Engine, place: Place) -> tuple[HttpServer, float]:
    """A server that answers, and the seconds it took to get there. One that starts slowly is kept for the next round."""
    server = place.servers.get(engine.name)
    ready = -1.0
    if server is None:
        server = start_server(engine, place)
        try:
            ready = server.wait_ready()
        except BaseException:
            server.stop()
            raise
        if engine.slow_start:
            place.servers[engine.name] = server
    else:
        server.resume()
    client.load(server.port, "model", [work.prompt(16, "warm")], 4, 1)
    return server, ready


def memory(engine: Engine, server: HttpServer, sizes: work.Sizes, place: tuple[int | str, ...]) -> Figures:
    """PSS of all its processes with a full KV cache. Ours is filled for it, all sequences at the same time; peers have
    written to all of theirs when they start."""
    if engine.ours:
        prompts = work.alike(sizes.memory_sequences, sizes.memory_tokens - 24, *place)
        client.load(server.port, "model", prompts, 16, sizes.memory_sequences)
    return {"memory_mib": memory_mib(server.pid)}
