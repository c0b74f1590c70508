"""Tokens per second with drafts on a GPU, against what the time of steps by rows predicts.

    python bench/speculate_gpu.py                    Llama-3-8B's shape, random weights, bfloat16; 1 to 256 at once
    python bench/speculate_gpu.py --deterministic    drafts from a recorded run, and answers are compared
    python bench/speculate_gpu.py --bubble           how long the device is idle between two steps with drafts (draft_bubble.py)

Random weights have near ties, and a step with more rows rounds differently: a recorded answer soon is another one. So without
--deterministic it is drawn which drafts are accepted; all work of the device and of the host is that of real ones.

At the end it prints which goals are met, from these figures.

all        every row has all its drafts, as long as its answer has room for them: measured, predicted, and their ratio.
           Predicted are the same tokens in the same steps, each in the time of a plain step with as many rows
a step     tokens per step and sequence: fewer than the drawn share of right drafts gives, because answers end
by price   as a server does: how many drafts run is decided by their price. `unknown`: ngram, in text that never repeats
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from baton.llm import LLM, SamplingParams
from baton.worker.arrays import Int32s, Int64s
from baton.worker.cuda.graphs import BUCKETS
from baton.worker.draft_rows import DraftRows
from baton.worker.drafters.ngram import NgramDrafter
from baton.worker.drafters.price import ROWS_MAX, DraftPrice
from baton.worker.executors.base import Sampled
from baton.worker.failure import Failure
from baton.worker.in_flight_step import InFlightStep
from baton.worker.model_runner import ModelRunner
from draft_bubble import PHASES, Medians, Tracer
from gpu_serving import text_folder

PROMPT, VOCABULARY = 256, 128_256
GOLDEN = (5**0.5 - 1) / 2


class Chance:
    """Decides which drafts are right."""

    def __init__(self, share: float) -> None:
        self.share, self._rng = share, random.Random(0)
        self._spread = 0.5

    def right(self) -> bool:
        return self._rng.random() < self.share

    def leading(self, most: int) -> int:
        """Number of right drafts before the first wrong one. In a few dozen steps independent numbers would often give a tenth
        more or fewer tokens; multiples of the golden ratio are spread evenly."""
        self._spread = (self._spread + GOLDEN) % 1.0
        count, chance = 0, self.share
        while count < most and self._spread < chance:
            count, chance = count + 1, chance * self.share
        return count


class Anything:
    """A drafter whose drafts are accepted by chance."""

    def assign_slot(self, slot: int, grammar: Any = None) -> None:
        pass

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        return [int(tokens[-1])] * most

    def accepted(self, slot: int, drafted: int, accepted: int) -> None:
        pass

    def drop(self, slot: int) -> None:
        pass


class Recorded(Anything):
    """Drafts the recorded answer, of which each token is right by chance."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], chance: Chance) -> None:
        """`answers`: by prompt."""
        self._answers, self._chance = answers, chance

    def propose(self, slot: int, tokens: Int32s, most: int) -> Sequence[int]:
        answer = self._answers[tuple(tokens[:PROMPT].tolist())]
        at = len(tokens) - PROMPT
        return [token if self._chance.right() else (token + 1) % VOCABULARY for token in answer[at : at + most]]


class ChancePrice(DraftPrice):
    """A draft that was not run would have been right by chance too."""

    __slots__ = ("_chance",)

    def __init__(self, chance: Chance, row_cost: float) -> None:
        super().__init__(row_cost, waits=True)
        self._chance = chance

    def known(self, slot: int, tokens: Int32s) -> None:
        if self._guesses.pop(slot, None) is not None:
            self.accepted(slot, 1, int(self._chance.right()))


def accept_by(chance: Chance) -> Any:
    """DraftRows.accept with drawn results."""

    def accept(rows: DraftRows, tokens: Int64s, failures: dict[int, Failure], sampled: Sampled) -> Int64s:
        starts, drafts = rows.batch.spans.starts[:-1].tolist(), rows.batch.drafts
        assert drafts is not None
        last = np.array(starts, np.int64)
        for place, (row, most) in enumerate(zip(starts, drafts.tolist(), strict=True)):
            if count := chance.leading(most):
                sampled.accepted[place] = tokens[row : row + count].tolist()
            sampled.tokens[place], last[place] = tokens[row + count], row + count
        return last

    return accept


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    batch: int
    share: float | None
    "Share of right drafts. None: ngram, in text that never repeats."
    of_predicted: float | None
    "Tokens per second with all drafts, as a share of the predicted ones."
    ratio: float
    "Tokens per second with as many drafts as pay, as a multiple of those without."


def goals(rows: Sequence[Row]) -> list[str]:
    """A line per goal of issue 32. One without figures is not judged."""
    predicted = [row.of_predicted for row in rows if row.of_predicted is not None]
    alone = [row.ratio for row in rows if row.batch == 1 and row.share == 0.75]
    checks = (
        ("all drafts: within 10 % of what rows cost", predicted, all(0.9 <= each <= 1.1 for each in predicted)),
        ("1 at once, 75 % right: at least 2x", alone, min(alone, default=0.0) >= 2.0),
        ("at least 0.97x everywhere", [row.ratio for row in rows], min((row.ratio for row in rows), default=0.0) >= 0.97),
    )
    return [
        f"{'met' if met else 'missed'}: {goal} ({min(found):.2f} to {max(found):.2f})" if found else f"not judged: {goal}"
        for goal, found, met in checks
    ]


class StepTimes:
    """Rows and seconds of the steps of a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._finish = runner.finish
        self._finished_at = 0.0
        self._after_decode = False
        self.steps: list[int] = []
        "Rows of each step."
        self.seconds: dict[int, list[float]] = defaultdict(list)
        "Of decode steps behind decode steps, by rows."
        runner.finish = self.finish  # type: ignore[method-assign]

    def finish(self, in_flight: InFlightStep) -> None:
        self._finish(in_flight)
        now, decodes = perf_counter(), not in_flight.plan.new and max(in_flight.plan.run.counts, default=0) == 1
        if decodes and self._after_decode:
            self.seconds[in_flight.rows].append(now - self._finished_at)
        if in_flight.rows:
            self.steps.append(in_flight.rows)
        self._after_decode, self._finished_at = decodes, now


@dataclass(slots=True)
class Measured:
    """Some calls, each from the moment on that all sequences have their first token."""

    rates: list[float] = field(default_factory=list)
    "Tokens per second of each call."
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    "Rows of each step, of all calls."

    @property
    def rate(self) -> float:
        return median(self.rates)


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        # Plain steps have a sequence for each row.
        sequences = max(rows_of(batch, options.drafts) if options.bubble else batch for batch in options.batches)
        self.llm = LLM(
            str(folder), device="cuda", load_format="dummy", model_shape=options.shape, max_num_seqs=sequences,
            max_num_batched_tokens=4096, kv_blocks=sequences * (PROMPT + options.tokens + 64) // 16 + 64,
            max_model_len=2048, speculate="ngram", speculative_tokens=options.drafts, deterministic=options.deterministic,
            stop_on_repetition=False, enable_prefix_caching=False,
        )  # fmt: skip
        self.plain_accept = DraftRows.accept
        self.times = StepTimes(self.llm._runner)
        self.rates: dict[int, float] = {}
        "Tokens per second without drafts, by batch."
        self.step_seconds: dict[int, float] = {}
        "Time of a plain step, by rows."
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def prompts(self, batch: int) -> list[list[int]]:
        return [[random.Random(number).randrange(2, VOCABULARY) for _ in range(PROMPT)] for number in range(batch)]

    def run(self, batch: int, **sampling: Any) -> Measured:
        measured, tokens = Measured(), self.options.tokens
        prompts = self.prompts(batch)
        for _ in range(self.options.repeats):
            asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **sampling)
            began, made, first = perf_counter(), 0, 0.0
            answers: dict[int, list[int]] = {}
            for chunk in self.llm.stream(prompts, asked):
                answers.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
                made += len(chunk.token_ids)
                if len(answers) == batch and not first:
                    first, began, made = perf_counter(), perf_counter(), 0
                    self.times.steps.clear()
            measured.rates.append(made / (perf_counter() - began))
            measured.tokens += made
            measured.steps += self.times.steps
            for number, answer in answers.items():
                known = self.answers.setdefault(tuple(prompts[number]), answer)
                if self.options.deterministic and known != answer:
                    raise SystemExit(f"{batch} at once: the answers differ")
        return measured

    def plain(self, batch: int) -> float:
        if batch not in self.rates:
            self.times.seconds.clear()
            self.rates[batch] = self.run(batch, disable_spec_decode=True).rate
            self.step_seconds[batch] = median(self.times.seconds[batch])
        return self.rates[batch]

    def predicted(self, measured: Measured, rows: int) -> float:
        """Tokens per second, if each step took the time of a plain one with as many rows. Measured are steps with `rows` rows,
        and those with as many as a recorded graph has: a step with fewer rows runs the next larger graph."""
        sizes = sorted({rows, *(bucket for bucket in BUCKETS if bucket < rows)})
        seconds = 0.0
        for count in measured.steps:
            size = next(size for size in sizes if size >= count)
            self.plain(size)
            seconds += self.step_seconds[size]
        return measured.tokens / seconds

    def drafting(self, batch: int, share: float, *, by_price: bool) -> Measured:
        chance, runner = Chance(share), self.llm._runner
        recorded = self.options.deterministic
        if recorded:
            self.plain(batch)
        runner.drafter = Recorded(self.answers, chance) if recorded else Anything()
        cost = runner.executor.row_cost
        runner._price = None if not by_price else DraftPrice(cost, waits=True) if recorded else ChancePrice(chance, cost)
        DraftRows.accept = self.plain_accept if recorded else accept_by(chance)  # type: ignore[method-assign]
        self.llm._begin()
        return self.run(batch)

    def unknown(self, batch: int) -> Measured:
        DraftRows.accept = self.plain_accept  # type: ignore[method-assign]
        runner = self.llm._runner
        runner.drafter, runner._price = NgramDrafter(), DraftPrice(runner.executor.row_cost, waits=True)
        self.llm._begin()
        return self.run(batch)

    def traced(self, batch: int, **sampling: Any) -> Medians:
        with Tracer(self.llm._runner) as tracer:
            self.run(batch, **sampling)
        return tracer.medians()

    def waiting(self, batch: int) -> Medians:
        """Plain steps that wait for the tokens before them, as those of structured output do."""
        runner: Any = self.llm._runner
        runner.must_wait = lambda plan: bool(runner._in_flight)
        try:
            return self.traced(batch, disable_spec_decode=True)
        finally:
            del runner.must_wait

    def bubble(self) -> None:
        """Steps with all drafts, beside plain ones with as many rows; and plain ones that wait, beside those that do not."""
        options, chance = self.options, Chance(0.75)
        print("| at once | rows | ahead ms | idle us | waits ms | more | idle us |", " | ".join(PHASES), "|")
        print("| --- | --- | --- | --- | --- | --- | --- |", " | ".join(["---"] * len(PHASES)), "|")
        for batch in options.batches:
            rows = rows_of(batch, options.drafts)
            self.llm._runner.drafter, self.llm._runner._price = Anything(), None
            DraftRows.accept = accept_by(chance)  # type: ignore[method-assign]
            self.llm._begin()
            print_bubble(batch, rows, self.traced(rows, disable_spec_decode=True), self.traced(batch))
            print_bubble(batch, batch, self.traced(batch, disable_spec_decode=True), self.waiting(batch))

    def table(self) -> list[Row]:
        made = list[Row]()
        options, drafts = self.options, self.options.drafts
        print("| at once | accepted | plain tok/s | all drafts | a step | predicted | of it | by price | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for batch in options.batches:
            rows, plain = batch * (1 + drafts), self.plain(batch)
            for share in options.acceptance:
                whole, of_predicted = " | | | ", None
                if batch * drafts <= ROWS_MAX and rows <= max(options.batches):
                    found = self.drafting(batch, share, by_price=False)
                    predicted, a_step = self.predicted(found, rows), found.tokens / batch / len(found.steps)
                    of_predicted = found.rate / predicted
                    whole = f"{found.rate:.0f} | {a_step:.2f} | {predicted:.0f} | {of_predicted:.2f}"
                priced = self.drafting(batch, share, by_price=True).rate
                made.append(Row(batch, share, of_predicted, priced / plain))
                print(f"| {batch} | {share:.0%} | {plain:.0f} | {whole} | {priced:.0f} | {priced / plain:.2f} |", flush=True)
            priced = self.unknown(batch).rate
            made.append(Row(batch, None, None, priced / plain))
            print(f"| {batch} | unknown | {plain:.0f} | | | | | {priced:.0f} | {priced / plain:.2f} |", flush=True)
        return made


def rows_of(batch: int, drafts: int) -> int:
    """Rows of a step in which all sequences have drafts, as far as they fit."""
    return batch + min(batch * drafts, ROWS_MAX)


def print_bubble(batch: int, rows: int, ahead: Medians, waits: Medians) -> None:
    share, host = waits.period / ahead.period - 1, " | ".join(f"{1000 * waits.host[phase]:.0f}" for phase in PHASES)
    print(
        f"| {batch} | {rows} | {ahead.period:.3f} | {1000 * ahead.idle:.0f} | {waits.period:.3f} | {share:.1%} "
        f"| {1000 * waits.idle:.0f} | {host} |",
        flush=True,
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--acceptance", type=numbers, default=[25, 50, 75, 100], help="per cent")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--bubble", action="store_true", help="measure steps that wait for tokens, and nothing else")
    options = parser.parse_args()
    options.acceptance = [share / 100 for share in options.acceptance]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, text_folder(Path(scratch), VOCABULARY))
        if options.bubble:
            bench.bubble()
        else:
            print("", *goals(bench.table()), sep="\n")


if __name__ == "__main__":
    main()
