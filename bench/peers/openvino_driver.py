"""OpenVINO GenAI behind JSON lines; one order a line on stdin, one answer a line on stdout.

    python openvino_driver.py MODEL.gguf THREADS

    {"prompts": [[ids]], "output": n}   ->  {"seconds": s, "tokens": count, "steps": [[seconds since the start, tokens], ...]}

Its continuous batching, which reads GGUF files and was faster than its plain pipeline. Run by bench/cpu.py in a virtual
environment of its own; imports nothing of Baton.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def main() -> None:
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs, scheduling.max_num_batched_tokens = 1, 64, 512
    scheduling.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduling, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])})
    say({"ready": f"OpenVINO GenAI {version('openvino-genai')}"})
    for line in sys.stdin:
        order = json.loads(line)
        say(generate(pipe, order["prompts"], order["output"]))


def generate(pipe: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = count
    config.ignore_eos, config.do_sample = True, False
    steps: list[tuple[float, int]] = []
    begin = perf_counter()
    handles = [
        pipe.add_request(number, openvino.Tensor(np.array([ids], dtype=np.int64)), config) for number, ids in enumerate(prompts)
    ]
    total = 0
    while pipe.has_non_finished_requests():
        pipe.step()
        new = sum(len(part.generated_ids) for handle in handles if handle.can_read() for part in handle.read().values())
        total += new
        steps.append((perf_counter() - begin, new))
    return {"seconds": perf_counter() - begin, "tokens": total, "steps": steps}


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
