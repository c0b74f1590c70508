"""Baton's LLM behind JSON lines; one order a line on stdin, one answer a line on stdout.

python baton_driver.py MODEL.gguf|FOLDER THREADS QUANTIZATION KV_BLOCKS

{"prompts": [[ids]], "output": n}   ->  {"seconds": s, "tokens": count, "steps": [[seconds since the start, tokens], ...]}
with "slots": n                         at most n sequences run at once; an engine of its own, made at the first such order
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from time import perf_counter
from typing import Any, get_args, get_type_hints

from baton import __version__
from baton.cli.run import quiet_waiting

quiet_waiting()  # before torch is there

from baton.config import ServeConfig  # noqa: E402
from baton.core.events import StepDone  # noqa: E402
from baton.llm import LLM, SamplingParams  # noqa: E402
from baton.protocol.output import Emit  # noqa: E402

SLOTS = 64


class SteppedLLM(LLM):
    """Notes when every step ended and how many tokens it gave."""

    def generate_stepped(self, prompts: list[list[int]], output: int) -> dict[str, Any]:
        self.begin, self.emitted, self.steps = perf_counter(), 0, list[tuple[float, int]]()
        answers = self.generate(prompts, SamplingParams(temperature=0.0, max_tokens=output, min_tokens=output))
        seconds = perf_counter() - self.begin
        return {"seconds": seconds, "tokens": sum(len(a.outputs[0].token_ids) for a in answers), "steps": self.steps}

    def _dispatch(self, event: Any) -> None:
        before = getattr(self, "emitted", 0)
        super()._dispatch(event)
        if isinstance(event, StepDone):
            self.steps.append((perf_counter() - self.begin, self.emitted - before))

    def _on_emit(self, emit: Emit) -> None:
        self.emitted += sum(len(row[4]) for row in emit.tokens)
        super()._on_emit(emit)


def main() -> None:
    model, threads, quantization, blocks = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    known = get_args(get_type_hints(ServeConfig)["quantization"])
    if quantization not in known:
        say({"error": f"not supported by this Baton, which knows {', '.join(known)}"})
        return

    @lru_cache
    def llm(slots: int) -> SteppedLLM:
        return SteppedLLM(model, threads=threads, quantization=quantization, kv_blocks=blocks, max_num_seqs=slots)

    layout = llm(SLOTS)._runner.pool.layout
    say({"ready": f"Baton {__version__} {quantization}", "kv_bytes_a_token": layout.block_bytes // layout.block_size})
    for line in sys.stdin:
        order = json.loads(line)
        say(llm(order.get("slots", SLOTS)).generate_stepped(order["prompts"], order["output"]))


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
