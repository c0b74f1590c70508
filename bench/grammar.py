"""What a grammar costs: decode steps of 32 sequences, with a JSON schema and without, in one process and by turns.

    python bench/grammar.py [--model smollm2] [--batch 32] [--tokens 96] [--rounds 5] [--threads 1]

Goal: at most 5 % at batch 32. Sequences of all kinds make as many tokens (the schemas have no short answers), once at
temperature 1, where all logits are needed anyway, and once greedy. The times are of `LLM.generate` on the same prompts: on the
clock, and of the processors, which others on the machine disturb less: least with one thread, which waits for nobody.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter, process_time

from baton.llm import LLM, SamplingParams, StructuredOutputsParams

SCHEMAS = {
    "strings": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    # Masks take ten times as long: near the end of a string, which tokens are short enough must be found one by one.
    "bounded strings": {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 60}, "minItems": 1000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the forward pass; as many as there are cores unless said")
    options = parser.parse_args()
    threads = {} if options.threads is None else {"threads": options.threads}
    llm = LLM(options.model, max_num_seqs=options.batch, enable_prefix_caching=False, **threads)
    prompts = [f"Words of number {number}: " for number in range(options.batch)]
    kinds = {"free": None} | {name: StructuredOutputsParams(json=schema) for name, schema in SCHEMAS.items()}
    for temperature in (1.0, 0.0):
        spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
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
                begin = perf_counter(), process_time()
                answers = llm.generate(prompts, params)
                assert all(len(answer.outputs[0].token_ids) == options.tokens for answer in answers)
                if turn:
                    spent[kind].append((perf_counter() - begin[0], process_time() - begin[1]))
        for clock, where in enumerate(("on the clock", "of processors")):
            free_s = [times[clock] for times in spent["free"]]
            print(f"temperature {temperature:g}, {where}: free {1e3 * median(free_s) / options.tokens:.2f} ms a step")
            for kind in SCHEMAS:
                seconds = [times[clock] for times in spent[kind]]
                least = 100 * (min(seconds) / min(free_s) - 1)
                over = sorted(100 * (one / free - 1) for one, free in zip(seconds, free_s, strict=True))
                print(
                    f"    {kind}: {1e3 * median(seconds) / options.tokens:.2f} ms; overhead {median(over):+.1f} % "
                    f"(rounds {over[0]:+.1f} to {over[-1]:+.1f} %; least against least {least:+.1f} %)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
