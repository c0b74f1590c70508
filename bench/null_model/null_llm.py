"""`LLM` without a model: python -m null_llm SETTINGS_JSON SEQUENCES PROMPT OUTPUT. Prints what it cost as JSON."""

from __future__ import annotations

import json
import sys
from time import perf_counter, process_time
from types import ModuleType
from typing import Any

from null_runner import build_null

stand_in: Any = ModuleType("baton.worker.build")
stand_in.build_worker = build_null
sys.modules["baton.worker.build"] = stand_in

from baton.llm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    settings, sequences, prompt, output = json.loads(sys.argv[1]), *map(int, sys.argv[2:])
    llm = LLM(settings.pop("model"), **settings)
    asked = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    llm.generate([[1] * prompt], SamplingParams(temperature=0.0, max_tokens=8))  # warm
    notes = llm._runner.notes  # type: ignore[attr-defined]
    steps, cpu, wall = len(notes.worked), process_time(), perf_counter()
    answers = llm.generate([[number + 1] * prompt for number in range(sequences)], asked)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    worked = list(notes.worked)[steps:]
    print(json.dumps({"tokens": tokens, "steps": len(worked), "seconds": wall, "cpu": cpu, "worked": sum(worked)}))


if __name__ == "__main__":
    main()
