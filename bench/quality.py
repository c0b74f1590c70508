"""What quantisation costs in quality: perplexity of a real text against float32, and right answers to easy questions.

    python bench/quality.py [--model smollm2] [--quantizations none,int8,int4] [--venvs DIR] [--windows 16] [--window 512]
    python bench/quality.py --windows 0 --draws 3       # questions only; also 60 answers with the defaults of the server

The text is there on every machine: the Python language reference that ships with Python (pydoc_data.topics), in the order of
its titles, and the GPL-3 where the system has it (Debian). Windows of one length are taken at even distances, three quarters of
them from the reference; every token of a window but the first is scored, by `LLM.generate` with prompt_logprobs.

ppl           exp of the mean negative log-probability of a token
difference    against `none`, token by token, so that the text's own spread is not in it; ± is its standard error
bound         8 bits 0.5 %, 4 bits 5 %
questions     twenty easy ones (questions.py): answers with the right word in them, and answers that have not ended after 300
              tokens; greedy, and with --draws N that many times with the sampling that a user gets

With --venvs, llama.cpp scores the same token ids with its own quantisations of the same file, requantised where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, stdev
from typing import get_args, get_type_hints

from baton.cli.run import quiet_waiting
from measuring.engines import ENGINES, Engine, Place, prepare, start_driver
from measuring.figures import NotMeasured
from measuring.goals import markdown
from measuring.machine import CORES
from measuring.work import Prompt, Sizes
from questions import HEADINGS, greedy_marks, shipped_marks

GPL = Path("/usr/share/common-licenses/GPL-3")
REFERENCE_SHARE = 0.75
BOUNDS = {"none": 0.0, "int8": 0.005, "int4": 0.05, "Q8_0": 0.005, "Q4_1": 0.05, "Q4_0": 0.05}

Logprobs = list[float]
Score = Callable[[list[Prompt]], "Scored"]


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs: Logprobs
    marks: list[list[str]] = field(default_factory=list)
    "Rows of the table of questions."


# The text


def texts() -> list[str]:
    reference = "\n\n".join(topics[title].strip() for title in sorted(topics))
    return [reference, *([GPL.read_text(encoding="utf-8")] if GPL.is_file() else [])]


def shares(windows: int, sources: int) -> list[int]:
    """How many windows each text gives."""
    first = windows if sources == 1 else round(windows * REFERENCE_SHARE)
    return [first, windows - first][:sources]


def evenly(ids: Sequence[int], length: int, count: int) -> list[Prompt]:
    """`count` windows at even distances; fewer where the text is too short."""
    whole = len(ids) // length
    count = min(count, whole)
    return [list(ids[(start := number * whole // count * length) : start + length]) for number in range(count)]


def windows_of(encode: Callable[[str], Sequence[int]], length: int, count: int) -> list[Prompt]:
    sources = texts()
    parts = zip(sources, shares(count, len(sources)), strict=True)
    return [window for text, share in parts for window in evenly(encode(text), length, share)]


# Scores


def baton_score(model: str, quantization: str, options: argparse.Namespace, windows: list[Prompt]) -> Scored:
    from baton.config import ServeConfig
    from baton.llm import LLM, SamplingParams

    known = get_args(get_type_hints(ServeConfig)["quantization"])
    if quantization not in known:
        raise NotMeasured(f"not supported by this Baton, which knows {', '.join(known)}")
    llm = LLM(model, quantization=quantization, threads=options.threads, kv_blocks=1024)
    marks = []
    if options.questions:
        marks.append(greedy_marks(llm).cells(f"{quantization}, greedy"))
    if options.draws:
        marks.append(shipped_marks(llm, options.draws).cells(f"{quantization}, as served"))
    answers = [] if not windows else llm.generate(windows, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    places = [(answer, place) for answer in answers for place in range(1, len(answer.prompt_token_ids))]
    return Scored([answer.prompt_logprobs[place].logprob for answer, place in places], marks)


def llamacpp_score(engine: Engine, place: Place, windows: list[Prompt]) -> Scored:
    prepare(engine, place)
    driver = start_driver(engine, place)
    try:
        driver.wait_ready()
        return Scored([value for window in driver.ask(score=windows)["logprobs"] for value in window])
    finally:
        driver.stop()


# Figures


@dataclass(frozen=True, slots=True)
class Quality:
    name: str
    ppl: float
    difference: float
    "Relative, against float32."
    error: float
    bound: float

    @classmethod
    def of(cls, name: str, found: Logprobs, exact: Logprobs, bound: float) -> Quality:
        if len(found) != len(exact):
            raise NotMeasured(f"{len(found)} log-probabilities where there are {len(exact)}")
        losses = [ours - theirs for ours, theirs in zip(exact, found, strict=True)]
        error = stdev(losses) / sqrt(len(losses)) if len(losses) > 1 else 0.0
        return cls(name, exp(-fmean(found)), exp(fmean(losses)) - 1.0, error, bound)

    @property
    def met(self) -> bool:
        return self.difference <= self.bound

    def cells(self) -> list[str]:
        bound = f"{100 * self.bound:g} %" if self.bound else "-"
        verdict = ("met" if self.met else "**missed**") if self.bound else ""
        return [self.name, f"{self.ppl:.4f}", f"{100 * self.difference:+.3f} % ± {100 * self.error:.3f}", bound, verdict]


def main() -> None:
    options = read_options()
    quiet_waiting()
    from baton.models.names import resolve
    from baton.text.loading import load_model_text

    path = resolve(options.model)
    windows = windows_of(load_model_text(str(path)).tokenizer.encode, options.window, options.windows)
    scored = sum(len(window) - 1 for window in windows)
    print(f"{path.name}: {len(windows)} windows of {options.window} tokens, {scored} tokens scored\n", flush=True)

    asked = options.quantizations.split(",")
    ways: dict[str, Score] = {
        name: lambda asked, name=name: baton_score(str(path), name, options, asked)  # type: ignore[misc]
        for name in [*(["none"] if windows else []), *(each for each in asked if each != "none" or not windows)]
    }
    with Path(os.devnull).open("w") as log:
        if options.venvs:
            place = Place(venvs=options.venvs.absolute(), model=path, threads=options.threads, sizes=Sizes(), log=log)
            for engine in (each for each in ENGINES.values() if each.family == "llamacpp"):
                ways[engine.name] = lambda asked, engine=engine: llamacpp_score(engine, place, asked)  # type: ignore[misc]
        found, marks = score_all(ways, windows)
    if windows:
        print(markdown(["weights", "ppl", "against float32", "bound", ""], found.values()))
    if marks:
        print("\n" + markdown(HEADINGS, marks))
    if options.json:
        rows = {"windows": len(windows), "tokens": scored, "rows": found, "questions": marks}
        options.json.write_text(json.dumps(rows, indent=1))


def score_all(ways: dict[str, Score], windows: list[Prompt]) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Rows of the two tables."""
    exact: Logprobs = []
    rows: dict[str, list[str]] = {}
    marks: list[list[str]] = []
    for name, score in ways.items():
        try:
            scored = score(windows)
            for cells in scored.marks:
                marks.append(cells)
                print(" ".join(cells), file=sys.stderr, flush=True)
            if not windows:
                continue
            exact = exact or scored.logprobs
            bound = BOUNDS[ENGINES[name].variant if name in ENGINES else name]
            rows[name] = Quality.of(name, scored.logprobs, exact, bound).cells()
        except NotMeasured as why:
            rows[name] = [name, "-", "-", "-", str(why)]
        print(" ".join(rows[name]), file=sys.stderr, flush=True)
    return rows, marks


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--quantizations", default="none,int8,int4", help="comma separated")
    parser.add_argument("--windows", type=int, default=16, help="0: no perplexity")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--questions", action=argparse.BooleanOptionalAction, default=True, help="ask the questions, greedily")
    parser.add_argument("--draws", type=int, default=0, help="ask each question so many times with the defaults of the server")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--venvs", type=Path, help="folder of the peers: llama.cpp is scored too")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
