"""transformers behind JSON lines: {"prompts": [[ids]], "output": n} in, {"seconds": s, "tokens": count} out.

    python transformers_driver.py MODEL.gguf|FOLDER THREADS

Run by bench/cpu.py in a virtual environment of its own; imports nothing of Baton.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import torch
import transformers
from transformers import AutoModelForCausalLM


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


def generate(model: torch.nn.Module, prompts: list[list[int]], count: int) -> dict[str, float]:
    """Prompts of several lengths are padded on the left, as generate() wants them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    begin = perf_counter()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return {"seconds": perf_counter() - begin, "tokens": (out.shape[1] - width) * len(prompts)}


def say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
