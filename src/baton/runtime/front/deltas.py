"""What an engine emits, told to those who wait for it: rows of many requests in, one delta per sequence out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from baton.api.generate.engine_client import Delta
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit, tokens_of
from baton.protocol.step import TokenLogprob
from baton.runtime.front.stream import Stream


def deliver(emit: Emit, streams: Mapping[RequestId, Stream]) -> None:
    """Most have tokens and nothing else, one row for each of many sequences: no call per row but those two."""
    if emit.ended or emit.logprobs or emit.begun:
        _deliver_gathered(emit, streams)
        return
    for request, attempt, index, position, tokens in emit.tokens:
        stream = streams.get(request)
        if stream is None:
            continue
        told = stream.open.get(index)
        if type(tokens) is int and told is not None and position == len(told) and attempt == stream.attempt:
            told.append(tokens)  # as in `takes`, without the call
            stream.tell(Delta(index, [tokens]))
        elif fresh := stream.takes(attempt, index, position, tokens_of(tokens)):
            stream.tell(Delta(index, fresh))


def _deliver_gathered(emit: Emit, streams: Mapping[RequestId, Stream]) -> None:
    """The last token goes with its end, a token with what the model thought of it: one delta per sequence."""
    deltas: dict[tuple[RequestId, int], Delta] = {}
    thoughts: dict[tuple[RequestId, int], deque[TokenLogprob]] = {}

    def delta(request: RequestId, index: int) -> Delta:
        if (request, index) not in deltas:
            deltas[request, index] = Delta(index, [], [])
        return deltas[request, index]

    for request, index, row in emit.logprobs:
        stream = streams.get(request)
        if stream is not None and index == 0:
            stream.add_prompt_logprobs(row)
        if row.sampled is not None:
            thoughts.setdefault((request, index), deque()).append(row.sampled)
    for request, attempt, index, position, row_tokens in emit.tokens:
        tokens = tokens_of(row_tokens)
        waiting = thoughts.get((request, index))
        of_row = [waiting.popleft() for _ in tokens if waiting] if waiting else []
        stream = streams.get(request)
        if stream is not None and (fresh := stream.takes(attempt, index, position, tokens)):
            told = delta(request, index)
            told.tokens += fresh
            told.logprobs += of_row[len(tokens) - len(fresh) :]
    for begun in emit.begun:
        stream, known = streams.get(begun.request), deltas.get((begun.request, begun.index))
        if stream is not None and known is not None and known.tokens and stream.begins(begun):
            known.begun = begun
    for ended in emit.ended:
        stream = streams.get(ended.request)
        if stream is not None and stream.ends(ended):
            delta(ended.request, ended.index).ended = ended
    for (request, _), told in deltas.items():
        if (stream := streams.get(request)) is not None:
            stream.tell(told)
