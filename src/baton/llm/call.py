"""The state of one call: answers so far, and for a stream the unread chunks. Used only on the calling thread."""

from __future__ import annotations

from collections import deque

from baton.llm.outputs import Chunk, Output, SequenceAnswer, SequenceText
from baton.llm.sampling import SamplingParams
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.request import SamplingParams as WireParams
from baton.text.stops import StopAutomaton
from baton.text.tokenizer import Tokenizer

SequenceKey = tuple[RequestId, int]


class ClientCall:
    def __init__(self, *, streamed: bool = False) -> None:
        self.answers: dict[RequestId, SequenceAnswer] = {}
        "Answers in the order of the prompts."
        self.vectors: dict[RequestId, bytes] = {}
        "Embeddings of pooled prompts, by prompt."
        self.refused: dict[RequestId, str] = {}
        self.chunks: deque[Chunk] = deque()
        self.stopped: list[SequenceKey] = []
        "Sequences whose text reached a stop string; the machine does not know yet."
        self._streamed = streamed
        self._texts: dict[SequenceKey, SequenceText] = {}
        self._places: dict[RequestId, int] = {}

    def add(self, request: GenerateRequest, prompt: str | None, asked: WireParams, tokenizer: Tokenizer) -> None:
        stops = StopAutomaton(asked.stops if isinstance(asked, SamplingParams) else ())
        outputs = [Output(index) for index in range(request.n)]
        self._places[request.id] = len(self._places)
        self.answers[request.id] = SequenceAnswer(list(request.prompt), outputs, prompt=prompt, request_id=request.id)
        for output in outputs:
            self._texts[request.id, output.index] = SequenceText(tokenizer, asked, stops, output)

    def on_emit(self, emit: Emit) -> None:
        """Add the tokens, log-probabilities and ends of an emit to the answers, and queue chunks for a stream."""
        before = self._lengths(emit) if self._streamed else {}
        self._take_tokens(emit)
        for request, index, row in emit.logprobs:
            output = self.answers[request].outputs[index]
            if row.sampled is not None and len(output.logprobs) < len(
                output.token_ids
            ):  # tokens after a stop string do not count
                output.logprobs.append(row.sampled)
            if row.embedding:
                self.vectors[request] = row.embedding
            if index == 0:
                self.answers[request].prompt_logprobs.update(enumerate(row.prompt, row.prompt_from))
        for ended in emit.ended:
            self._on_ended(ended)
        for key, lengths in before.items():
            self._add_chunk(key, *lengths)

    def _take_tokens(self, emit: Emit) -> None:
        # A stop token has no text, and only the end of its sequence identifies it.
        ends = [(ended.request, ended.index) for ended in emit.ended if ended.reason is FinishReason.STOP]
        rows = list(each_token(emit.tokens))
        last = {(request, index): place for place, (request, _, index, _, _) in enumerate(rows)} if ends else {}
        for place, (request, _, index, _, token) in enumerate(rows):
            text = self._texts[request, index]
            if text.stopped:
                continue
            text.feed(token, ends=bool(ends) and (request, index) in ends and last[request, index] == place)
            if text.stopped:
                self.stopped.append((request, index))

    def _on_ended(self, ended: Ended) -> None:
        text = self._texts[ended.request, ended.index]
        text.end(ended.reason.value)
        output = text.output
        output.error = "" if text.stopped else ended.detail
        output.cached_tokens, output.preemptions = ended.cached_tokens, ended.preemptions

    # Chunks

    def _lengths(self, emit: Emit) -> dict[SequenceKey, tuple[int, int, int]]:
        """Characters, tokens and log-probabilities of each output before `emit` is applied."""
        keys = [(request, index) for request, _, index, _, _ in emit.tokens]
        keys += [(ended.request, ended.index) for ended in emit.ended]
        outputs = {key: self._texts[key].output for key in keys}
        return {key: (len(output.text), len(output.token_ids), len(output.logprobs)) for key, output in outputs.items()}

    def _add_chunk(self, key: SequenceKey, characters: int, tokens: int, logprobs: int) -> None:
        request, index = key
        output = self._texts[key].output
        chunk = Chunk(
            self._places[request], index, output.text[characters:], output.token_ids[tokens:], output.logprobs[logprobs:]
        )
        if output.finish_reason:
            chunk.finish_reason, chunk.stop_reason, chunk.error = output.finish_reason, output.stop_reason, output.error
        if chunk.token_ids or chunk.text or chunk.finish_reason:
            self.chunks.append(chunk)
