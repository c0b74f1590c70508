"""transformers behind JSON lines; one order a line on stdin, one answer a line on stdout.

    python transformers_driver.py MODEL.gguf|FOLDER THREADS

    {"prompts": [[ids]], "output": n}   ->  {"seconds": s, "tokens": count, "steps": [[seconds since the start, tokens], ...]}

Run by bench/cpu.py in a virtual environment of its own; imports nothing of Baton.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Watch(StoppingCriteria):
    """Asked after every step, and never stops anything."""

    def __init__(self) -> None:
        self.begin = perf_counter()
        self.steps: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.steps.append((perf_counter() - self.begin, len(input_ids)))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    where = (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})
    model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1]).eval()
    say({"ready": f"transformers {transformers.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        order = json.loads(line)
        say(generate(model, order["prompts"], order["output"]))


def generate(model: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Prompts of several lengths are padded on the left, as generate() wants them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    watch = Watch()
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    seconds = perf_counter() - watch.begin
    return {"seconds": seconds, "tokens": (out.shape[1] - width) * len(prompts), "steps": watch.steps}


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
