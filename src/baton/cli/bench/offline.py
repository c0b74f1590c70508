"""Measures without a server: an LLM in this process that records the time of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from baton.cli.bench.measures import Record
from baton.cli.bench.workload import PlannedRequest
from baton.llm import LLM
from baton.protocol.output import Emit, tokens_of
from baton.protocol.request import SamplingParams


class TimedLLM(LLM):
    """An LLM that records the time of every token."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.token_times: dict[str, list[float]] = {}
        super().__init__(model, **settings)

    def _on_emit(self, emit: Emit) -> None:
        now = perf_counter()
        for request, *_, tokens in emit.tokens:
            self.token_times.setdefault(str(request), []).extend([now] * len(tokens_of(tokens)))
        super()._on_emit(emit)

    def usable_ids(self) -> list[int]:
        """Ordinary tokens, from which prompts are drawn."""
        special = self.tokenizer.special_ids
        return [token for token in range(self.tokenizer.vocab_size) if token not in special]


def run_offline(
    llm: TimedLLM, asks: Sequence[PlannedRequest], progress: Callable[[int, int, str], None]
) -> tuple[list[Record], float]:
    """Runs all requests at once. min_tokens prevents early stops, so that every run does the same work."""
    usable = llm.usable_ids()
    prompts = [ask.token_ids(usable) for ask in asks]
    sampling = [SamplingParams(max_tokens=ask.output_tokens, min_tokens=ask.output_tokens) for ask in asks]
    llm.token_times.clear()
    progress(0, len(asks), "")
    begin = perf_counter()
    answers = llm.generate(prompts, sampling, progress=lambda done, total: progress(done, total, ""))
    seconds = perf_counter() - begin
    records = []
    # Requests are numbered in order of submission, so times sorted by number are in the order of the prompts.
    times = [llm.token_times[name] for name in sorted(llm.token_times, key=lambda name: int(name.rsplit("-", 1)[1]))]
    for ask, answer, came in zip(asks, answers, times, strict=True):
        output = answer.outputs[0]
        record = Record(sent=0.0, asked_tokens=ask.output_tokens, pieces=[moment - begin for moment in came])
        record.ended, record.output_tokens = record.pieces[-1], len(output.token_ids)
        record.input_tokens, record.cached_tokens = len(answer.prompt_token_ids), output.cached_tokens
        record.error = "" if output.finish_reason in ("length", "stop") else f"ended with {output.finish_reason}"
        records.append(record)
    return records, seconds
