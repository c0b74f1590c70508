"""vLLM's CPU build behind JSON lines: {"prompts": [[ids]], "output": n} in, {"seconds": s, "tokens": count} out.

    python vllm_driver.py FOLDER THREADS

Run by bench/cpu.py in a virtual environment of its own; imports nothing of Baton.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # vLLM prints on stdout; our lines go where it was
    os.dup2(2, 1)
    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    torch.set_num_threads(int(sys.argv[2]))
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=2048, max_num_seqs=32, enable_prefix_caching=False, seed=0)
    print(json.dumps({"ready": f"vLLM {__version__} float32"}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        count = order["output"]
        sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        begin = perf_counter()
        answers = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in order["prompts"]], sampling, use_tqdm=False)
        seconds = perf_counter() - begin
        print(
            json.dumps({"seconds": seconds, "tokens": sum(len(a.outputs[0].token_ids) for a in answers)}), file=out, flush=True
        )


if __name__ == "__main__":
    main()
