"""What a grammar costs: decode steps of 32 sequences, with a JSON schema and without, in one process and by turns.

    python bench/grammar.py [--model smollm2] [--batch 32] [--tokens 96] [--rounds 5]

Goal: at most 5 % at batch 32. Sequences of both kinds make as many tokens (the schema has no short answers), once at
temperature 1, where all logits are needed anyway, and once greedy. The times are of `LLM.generate` on the same prompts.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

from baton.llm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 60}, "minItems": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, slots=options.batch, enable_prefix_caching=False)
    prompts = [f"Words of number {number}: " for number in range(options.batch)]
    kinds = {"free": None, "schema": StructuredOutputsParams(json=SCHEMA)}
    for temperature in (1.0, 0.0):
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(options.rounds + 1):  # the first one warms up
            for kind, structured in kinds.items():
                free = structured is None
                params = SamplingParams(
                    max_tokens=options.tokens,
                    temperature=temperature,
                    seed=turn,
                    ignore_eos=free,
                    structured_outputs=structured,
                )
                begin = perf_counter()
                answers = llm.generate(prompts, params)
                assert all(len(answer.outputs[0].token_ids) == options.tokens for answer in answers)
                if turn:
                    seconds[kind].append(perf_counter() - begin)
        free_s, schema_s = median(seconds["free"]), median(seconds["schema"])
        ratios = sorted(schema / free for free, schema in zip(seconds["free"], seconds["schema"], strict=True))
        print(
            f"temperature {temperature:g}: free {1e3 * free_s / options.tokens:.2f} ms a step, schema "
            f"{1e3 * schema_s / options.tokens:.2f} ms; overhead {100 * (median(ratios) - 1):+.1f} % "
            f"(rounds {100 * (ratios[0] - 1):+.1f} to {100 * (ratios[-1] - 1):+.1f} %)"
        )


if __name__ == "__main__":
    main()
