"""Baton beside its peers on this machine's CPU, in one run: every goal of the CPU as a ratio, with what bounds it.

    python bench/cpu.py --venvs DIR [--rounds 3] [--engines baton,llamacpp] [--quick] [--json FILE]

case          workload (the same token ids for every engine, from a seed; no engine may stop early)
decode        one stream, prompt of 128 tokens, 128 new ones, timed from the first to the last
prefill       one prompt of 1,024 tokens, 1 new token; the median of 3
batch         32 requests at once, prompts of 64 to 256 tokens, 128 new ones each
http          the same from 16 streaming clients in a closed loop: output, time to the first token, gaps between tokens
ready         from the start of the server's process until /health says 200; files are in the page cache
memory        PSS of all the server's processes, KV cache with room for 16 sequences of 2,048 tokens and all of it written to
neighbour     one stream and 8 requests beside a process that never waits, in a session of its own: the share of speed kept
growth        µs an output token from 1 to 64 sequences running, and for one stream from 256 to 4,096 tokens of context

Within a round every case is measured with one engine after the other, seconds apart, so that a slow minute hurts all of them;
the order turns from round to round. A measurement is repeated, with other ids, until it was undisturbed (measuring/machine.py
says what that is), --tries times at most. What the machine can do at best is measured in the same run (peers/limits.c).

Every engine has the settings that made it fastest: threads of llama.cpp spin, which is its default, and it runs without flash
attention where that was faster. Every try is a line of --json; tables go to stdout, what happens to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.models.names import resolve
from baton.models.open import open_model
from measuring import machine, work
from measuring.cases import OFFLINE, Case, Figures, http, memory, ready_server, warm
from measuring.engines import Engine, Place, chosen, prepare, start_driver
from measuring.figures import NotMeasured
from measuring.goals import Results, figures_table, goals_table, growth_tables, limits_table
from measuring.machine import Disturbance
from measuring.processes import Process

# A group of 32 has one float16 scale, and with a minimum two.
BYTES_A_WEIGHT = {
    "Q4_0": 0.5625,
    "Q4_1": 0.625,
    "Q8_0": 1.0625,
    "int4": 0.625,
    "int8": 1.0625,
    "none": 4.0,
    "bfloat16": 2.0,
    "float32": 4.0,
}


class Run:
    """One run: its engines, and the rows they have given so far."""

    def __init__(self, options: argparse.Namespace, place: Place, engines: list[Engine]) -> None:
        self.options, self.place, self.engines = options, place, engines
        self.cases: list[str] = options.cases.split(",")
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.kv_bytes: dict[str, int] = {}

    # One measurement

    def measure(self, engine: Engine, case: str, number: int, process: Process, once: Callable[[int], Figures]) -> None:
        """Until it was undisturbed, or often enough."""
        for attempt in range(self.options.tries):
            early = machine.read([process.pid])
            figures = once(attempt)
            disturbance = Disturbance.between(early, machine.read([process.pid]))
            self.note(engine, case, number, attempt, figures, disturbance)
            if disturbance.quiet:
                return

    def note(self, engine: Engine, case: str, number: int, attempt: int, figures: Figures, disturbance: Disturbance) -> None:
        where = {"round": number, "case": case, "engine": engine.name, "try": attempt}
        shares = {"pressure": round(disturbance.pressure, 3), "foreign": round(disturbance.foreign, 3)}
        row = {**where, **shares, "load": os.getloadavg()[0], **figures}
        self.rows.append(row)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        shown = ", ".join(f"{k} {v:,.2f}" for k, v in figures.items() if isinstance(v, float))
        busy = "" if disturbance.quiet else f"  ({100 * disturbance.foreign:.0f} % foreign)"
        say(f"round {number}  {case:<16} {engine.name:<15} {shown}{busy}")

    @contextmanager
    def leaving_out(self, engine: Engine, case: str) -> Iterator[None]:
        """What cannot be measured is not tried again and said at the end; the others go on."""
        try:
            yield
        except NotMeasured as why:
            self.left_out[f"{engine.name} {case}"] = str(why)
            say(f"{engine.name} {case}: left out: {why}")

    def works(self, engine: Engine, case: str) -> bool:
        return f"{engine.name} {case}" not in self.left_out

    # Rounds

    def start(self) -> None:
        for engine in list(self.engines):
            with self.leaving_out(engine, "start"):
                prepare(engine, self.place)
                driver = start_driver(engine, self.place)
                self.place.drivers[engine.name] = driver
                ready = driver.wait_ready()
                self.names[engine.name] = ready["ready"] + (f" ({ready['features']})" if "features" in ready else "")
                if "kv_bytes_a_token" in ready:
                    self.kv_bytes[engine.name] = ready["kv_bytes_a_token"]
                warm(driver)
                driver.pause()
        failed = {words.split()[0] for words in self.left_out}
        self.engines = [engine for engine in self.engines if engine.name not in failed]

    def offline(self, case: Case, engine: Engine, number: int) -> None:
        driver, sizes = self.place.drivers[engine.name], self.place.sizes
        with driver.turn():
            warm(driver)
            self.measure(engine, case.name, number, driver, lambda t: case.measure(driver, sizes, (number, case.name, t)))

    def served(self, engine: Engine, number: int) -> None:
        """Start, load, memory in the last round, end. What starts slowly is paused instead."""
        last, sizes = engine.reference or number == self.options.rounds - 1, self.place.sizes
        early = machine.read([])
        server, seconds = ready_server(engine, self.place)
        try:
            if seconds >= 0:
                found = Disturbance.between(early, machine.read([server.pid]))
                self.note(engine, "ready", number, 0, {"ready_s": seconds}, found)
            if "http" in self.cases:
                self.measure(engine, "http", number, server, lambda t: http(server, sizes, (number, "http", t)))
            if last and "memory" in self.cases:
                filled = memory(engine, server, sizes, (number, "memory"))
                self.note(engine, "memory", number, 0, filled, Disturbance(0.0, 0.0))  # the same, whoever computes
        finally:
            if engine.slow_start and not last:
                server.pause()
            else:
                server.stop()
                self.place.servers.pop(engine.name, None)

    def turns(self, number: int) -> list[Engine]:
        shift = number % len(self.engines) if self.engines else 0
        return self.engines[shift:] + self.engines[:shift]

    def round(self, number: int) -> None:
        for case in OFFLINE:
            for engine in self.turns(number):
                if case.name in self.cases and case.suits(engine, number) and self.works(engine, case.name):
                    with self.leaving_out(engine, case.name):
                        self.offline(case, engine, number)
        if {"http", "ready", "memory"} & set(self.cases):
            for engine in self.turns(number):
                if engine.serves and self.works(engine, "served") and not (number and engine.reference):
                    with self.leaving_out(engine, "served"):
                        self.served(engine, number)

    def all(self) -> None:
        try:
            self.start()
            for number in range(self.options.rounds):
                self.round(number)
        finally:
            for process in [*self.place.drivers.values(), *self.place.servers.values()]:
                process.stop()


def model_facts(path: Path, engines: list[Engine]) -> dict[str, dict[str, float]]:
    """What one token asks for: weights in products, and their bytes. 4-bit engines keep the output head at 8 bits."""
    c = open_model(path).config
    attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    layers = c.layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    head = c.hidden_size * c.vocab_size
    return {
        engine.name: {
            "layer_weights": layers,
            "weights": layers + head,
            "weight_bytes": layers * (size := BYTES_A_WEIGHT[engine.variant]) + head * max(size, BYTES_A_WEIGHT["int8"]),
        }
        for engine in engines
    }


def report(run: Run, limits: dict[str, Any]) -> str:
    facts = {"kv_bytes_a_token": run.kv_bytes, "model": model_facts(run.place.model, run.engines)}
    found = Results(run.rows, limits, facts)
    parts = [
        f"{machine.name()}; {run.place.threads} threads, {run.options.rounds} rounds, {run.place.model.name}",
        "\n".join(f"- {name}: {words}" for name, words in run.names.items()),
        "## Goals\n\n" + goals_table(found),
        "## Figures\n\n" + figures_table(found),
        "## Growth\n\n" + growth if (growth := growth_tables(found)) else "",
        "## Limits\n\n" + json.dumps(limits) + "\n\n" + limits_table(found),
        "\n".join(f"Left out: {what}: {why}" for what, why in run.left_out.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def read_options() -> argparse.Namespace:
    names = [*(case.name for case in OFFLINE), "http", "ready", "memory"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the peers; what is missing is made there")
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--engines", default="baton,llamacpp", help="names or families, comma separated")
    parser.add_argument("--cases", default=",".join(names), help="comma separated")
    parser.add_argument("--rounds", type=int, default=None, help="3, and with --quick 1")
    parser.add_argument("--quick", action="store_true", help="half the size, one round: a look, not a result")
    parser.add_argument("--threads", type=int, default=machine.CORES)
    parser.add_argument("--tries", type=int, default=None, help="for an undisturbed measurement: 3, and with --quick 1")
    parser.add_argument("--sleeping", action="store_true", help="threads of the peers that wait sleep")
    parser.add_argument("--json", type=Path, help="a line for every measurement")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the engines say on stderr")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.tries = options.tries or (1 if options.quick else 3)
    return options


def main() -> None:
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended
    options.venvs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with options.log.open("w") as log:
        place = Place(
            venvs=options.venvs.absolute(),
            model=Path(resolve(options.model)),
            threads=options.threads,
            sizes=work.QUICK if options.quick else work.Sizes(),
            log=log,
            sleeping=options.sleeping,
        )
        if options.json:
            options.json.write_text("")
        limits = machine.limits(options.venvs / "limits", options.threads)
        run = Run(options, place, chosen(options.engines))
        run.all()
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"limits": limits, "engines": run.names, "left_out": run.left_out}) + "\n")
    print(report(run, limits))
    say(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    sys.exit(0 if any(engine.ours for engine in run.engines) else 1)


if __name__ == "__main__":
    main()
