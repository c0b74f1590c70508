"""What an engine emits, told to those who wait for it: rows of many requests in, one delta per sequence out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from baton.api.generate.engine_client import Delta
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit
from baton.protocol.step import TokenLogprob
from baton.runtime.stream import Stream


def deliver(emit: Emit, streams: Mapping[RequestId, Stream]) -> None:
    """Most have tokens and nothing else, one for each of many sequences: no call per token but those two."""
    if emit.ended or emit.logprobs:
        _deliver_gathered(emit, streams)
        return
    for request, attempt, index, position, token in emit.tokens:
        stream = streams.get(request)
        if stream is None:
            continue
        told = stream.open.get(index)
        if told is not None and position == len(told) and attempt == stream.attempt:  # as in `takes`, without the call
            told.append(token)
            stream.tell(Delta(index, [token]))
        elif stream.takes(attempt, index, position, token):
            stream.tell(Delta(index, [token]))


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
    for request, attempt, index, position, token in emit.tokens:
        of_token = thoughts.get((request, index))
        thought = of_token.popleft() if of_token else None
        stream = streams.get(request)
        if stream is not None and stream.takes(attempt, index, position, token):
            told = delta(request, index)
            told.tokens.append(token)
            if thought is not None:
                told.logprobs.append(thought)
    for ended in emit.ended:
        stream = streams.get(ended.request)
        if stream is not None and stream.ends(ended):
            delta(ended.request, ended.index).ended = ended
    for (request, _), told in deltas.items():
        if (stream := streams.get(request)) is not None:
            stream.tell(told)
