"""vLLM's CPU build behind JSON lines; one order a line on stdin, one answer a line on stdout.

    python vllm_driver.py FOLDER THREADS DTYPE

    {"prompts": [[ids]], "output": n}   ->  {"seconds": s, "tokens": count, "steps": [[seconds since the start, tokens], ...]}

Run by bench/cpu.py in a virtual environment of its own; imports nothing of Baton. One process: with its engine in a
process of its own, which is its default, it was a tenth slower on two cores.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # vLLM prints on stdout; our lines go where it was
    os.dup2(2, 1)
    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    folder, threads, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    llm = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        seed=0,
    )
    engine = llm.llm_engine

    def generate(prompts: list[list[int]], count: int) -> dict[str, Any]:
        """What its own generate() does, with a look at the clock after every step."""
        sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        steps: list[tuple[float, int]] = []
        had: dict[str, int] = {}
        begin = perf_counter()
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), sampling)
        while engine.has_unfinished_requests():
            for answer in engine.step():
                had[answer.request_id] = len(answer.outputs[0].token_ids)
            steps.append((perf_counter() - begin, sum(had.values()) - sum(tokens for _, tokens in steps)))
        return {"seconds": perf_counter() - begin, "tokens": sum(had.values()), "steps": steps}

    print(json.dumps({"ready": f"vLLM {__version__} {dtype}"}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(generate(order["prompts"], order["output"])), file=out, flush=True)


if __name__ == "__main__":
    main()
