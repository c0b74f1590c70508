"""Baton's LLM behind JSON lines: {"prompts": [[ids]], "output": n} in, {"seconds": s, "tokens": count} out.

python baton_driver.py MODEL.gguf|FOLDER THREADS
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

from baton import __version__
from baton.cli.run import quiet_waiting


def main() -> None:
    quiet_waiting()
    from baton.llm import LLM, SamplingParams

    llm = LLM(sys.argv[1], threads=int(sys.argv[2]))
    print(json.dumps({"ready": f"Baton {__version__}"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        count = order["output"]
        begin = perf_counter()
        answers = llm.generate(order["prompts"], SamplingParams(max_tokens=count, min_tokens=count))
        seconds = perf_counter() - begin
        print(json.dumps({"seconds": seconds, "tokens": sum(len(a.outputs[0].token_ids) for a in answers)}), flush=True)


if __name__ == "__main__":
    main()
