"""Tokens per second with and without drafts, for answers that copy their prompt and for answers that do not.

    python bench/speculate.py         SmolLM2 in 8 bits: copying, editing, code, JSON, chat; 1, 4, 16, 64 and 256 at once
    python bench/speculate.py --quantization int4 --batches 1,4 --tokens 96
    python bench/speculate.py --model large --speculate draft:small     a smaller model drafts
    python bench/speculate.py --rounds 4        four requests for each place; the next begins when an answer ends, as under load

Without --rounds a batch takes as long as its longest answer, so drafts of the others save no time.

Both servers are in one process, and take turns: what slows down the machine slows down both. The ratio is the median of the
ratios of two runs side by side. The answers are compared: they are
the same to the last token, or this fails. At the end it prints which goals are met, and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter, process_time

from baton.llm import LLM, SamplingParams, StructuredOutputsParams

TEXT = (
    "The harbour of Tarn lies where two rivers meet. In 1804 a merchant named Ada Kvist built the first crane there, and ships "
    "from eleven countries came to unload salt, timber and wool. The crane burned down in 1851 and was never rebuilt; today a "
    "museum of small boats stands in its place, and every summer children learn to row in the old basin."
)
CODE = "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius ** 2\n"
CASES = {
    "copy": f"Repeat this text word for word:\n\n{TEXT}",
    "edit": f"Repeat this text, but write Lund instead of Tarn:\n\n{TEXT}",
    "code": f"Write this Python function again and add a case for squares and one for rectangles:\n\n{CODE}",
    "json": "Invent an order of a book shop as JSON.",
    "movie": "Describe the film Casablanca as JSON.",
    "chat": "Explain in a few sentences why the sky is blue and sunsets are red.",
}
Clock = Callable[[], float]
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "order_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "shipping_address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 20}, "postal_code": {"type": "string", "maxLength": 6}},
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
        "gift_wrapping": {"type": "boolean"},
    },
    "required": ["customer_name", "order_number", "shipping_address", "gift_wrapping"],
    "additionalProperties": False,
}

MOVIE = {
    "$id": "https://example.com/movie.schema.json",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "description": "A representation of a movie",
    "type": "object",
    "required": ["title", "director", "releaseDate"],
    "properties": {
        "title": {"type": "string"},
        "director": {"type": "string"},
        "releaseDate": {"type": "string", "format": "date"},
        "genre": {"type": "string", "enum": ["Action", "Comedy", "Drama", "Science Fiction"]},
        "duration": {"type": "string"},
        "cast": {"type": "array", "items": {"type": "string"}, "additionalItems": False},
    },
}
"""Published at json-schema.org/learn/json-schema-examples."""
SCHEMAS = {"json": SCHEMA, "movie": MOVIE}


def run(
    llm: LLM, case: str, requests: int, tokens: int, clock: Callable[[], float] = perf_counter
) -> tuple[float, list[list[int]]]:
    chats = [[{"role": "user", "content": f"{CASES[case]}\n\n({number})"}] for number in range(requests)]
    form = StructuredOutputsParams(json=SCHEMAS[case]) if case in SCHEMAS else None
    began = clock()
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=tokens, structured_outputs=form))
    seconds = clock() - began
    made = [answer.outputs[0].token_ids for answer in answers]
    return sum(map(len, made)) / seconds, made


def compared(plain: LLM, drafting: LLM, case: str, batch: int, asked: argparse.Namespace) -> float:
    """Prints a row of the table, and returns its ratio."""
    stats = drafting.instance.stats
    before = stats.drafts, sum(stats.accepted_drafts)
    rates: dict[LLM, list[float]] = {plain: [], drafting: []}
    for number in range(asked.repeats):
        answers = []
        for llm in (plain, drafting) if number % 2 else (drafting, plain):
            clock = process_time if asked.cpu_time else perf_counter
            rate, tokens = run(llm, case, batch * asked.rounds, asked.tokens, clock)
            rates[llm].append(rate)
            answers.append(tokens)
        if answers[0] != answers[1]:
            raise SystemExit(f"{case}: the answers differ")
    without, with_drafts = (median(made) for made in rates.values())
    ratio = median(after / before for before, after in zip(*rates.values(), strict=True))
    drafts, accepted = stats.drafts - before[0], sum(stats.accepted_drafts) - before[1]
    print(f"| {case} | {batch} | {without:.1f} | {with_drafts:.1f} | {ratio:.2f} | {drafts} | {accepted} |", flush=True)
    return ratio


def goals(ratios: Mapping[tuple[str, int], float], *, arm: bool) -> list[str]:
    """A line per goal of drafts on a CPU, by case and batch. One without figures is not judged."""
    copying = 1.2 if arm else 1.3
    checks = (
        (f"copying, 1 at once: at least {copying}x", [ratios.get(("copy", 1))], copying),
        ("JSON by a schema, 1 at once: at least 1.5x", [ratios.get(("json", 1))], 1.5),
        ("at least 0.97x everywhere", list(ratios.values()), 0.97),
    )
    return [judged(goal, [ratio for ratio in found if ratio is not None], least) for goal, found, least in checks]


def judged(goal: str, found: Sequence[float], least: float) -> str:
    if not found:
        return f"not judged: {goal}"
    return f"{'met' if min(found) >= least else 'missed'}: {goal} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--batches", default="1,4,16,64,256")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with --threads 1")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="requests per place")
    asked = parser.parse_args()
    settings = {"quantization": asked.quantization, "kv_memory_gib": 0.5, "threads": asked.threads}
    print("| case | at once | tokens/s without | with drafts | ratio | drafts | accepted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ratios: dict[tuple[str, int], float] = {}
    for batch in map(int, asked.batches.split(",")):
        plain = LLM(asked.model, max_num_seqs=batch, **settings)
        drafting = LLM(asked.model, max_num_seqs=batch, speculate=asked.speculate, speculative_tokens=asked.drafts, **settings)
        for case in asked.cases.split(","):
            ratios[case, batch] = compared(plain, drafting, case, batch, asked)
        plain.close()
        drafting.close()
    lines = goals(ratios, arm=platform.machine() == "aarch64")
    print("", *lines, sep="\n")
    raise SystemExit(any(line.startswith("missed") for line in lines))


if __name__ == "__main__":
    main()
