"""Tokens per second with and without drafts, for answers that copy their prompt and for answers that do not.

    python bench/speculate.py                            SmolLM2 in 8 bits: copying, editing, code, chat; 1, 4 and 16 at once
    python bench/speculate.py --quantization int4 --batches 1,4 --tokens 96

Both servers are in one process, and take turns: what slows down the machine slows down both. The answers are compared: they are
the same to the last token, or this fails.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

from baton.llm import LLM, SamplingParams

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
    "chat": "Explain in a few sentences why the sky is blue and sunsets are red.",
}


def run(llm: LLM, prompt: str, batch: int, tokens: int) -> tuple[float, list[list[int]]]:
    chats = [[{"role": "user", "content": f"{prompt}\n\n({number})"}] for number in range(batch)]
    began = perf_counter()
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=tokens))
    seconds = perf_counter() - began
    made = [answer.outputs[0].token_ids for answer in answers]
    return sum(map(len, made)) / seconds, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    settings = {"quantization": asked.quantization, "kv_memory_gib": 0.5, "enable_prefix_caching": True}
    plain = LLM(asked.model, **settings)
    drafting = LLM(asked.model, speculate="ngram", speculative_tokens=asked.drafts, **settings)
    print("| case | at once | tokens/s without | with ngram | ratio | drafts | accepted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in asked.cases.split(","):
        for batch in map(int, asked.batches.split(",")):
            stats = drafting.instance.stats
            before = stats.drafts, sum(stats.accepted_drafts)
            rates: dict[LLM, list[float]] = {plain: [], drafting: []}
            for _ in range(asked.repeats):
                answers = []
                for llm, made in rates.items():
                    rate, tokens = run(llm, CASES[case], batch, asked.tokens)
                    made.append(rate)
                    answers.append(tokens)
                if answers[0] != answers[1]:
                    raise SystemExit(f"{case}: the answers differ")
            without, with_drafts = (median(made) for made in rates.values())
            drafts, accepted = stats.drafts - before[0], sum(stats.accepted_drafts) - before[1]
            rate = f"{without:.1f} | {with_drafts:.1f} | {with_drafts / without:.2f}"
            print(f"| {case} | {batch} | {rate} | {drafts} | {accepted} |", flush=True)


if __name__ == "__main__":
    main()
