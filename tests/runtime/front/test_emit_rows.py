"""Rows with several tokens: a front delivers each position once, as if every token had come in a row of its own."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from run_loop import finish

from baton.api.generate.engine_client import Delta
from baton.core.delivery.front import ClientRequest, EngineLost, EngineReady, FrontMachine, Replay
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Begun, Emit, Ended, TokenRow, each_token
from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams
from baton.protocol.step import RowLogprobs, TokenLogprob
from baton.runtime.front.stream import Stream

A = RequestId("a")
ANSWER = list(range(100, 112))
"""Of both sequences: what is right at every position."""
Delivered = dict[int, tuple[list[int], list[float]]]


@st.composite
def emits(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """(sequence, first position, how many): runs that follow each other, or begin a little before what was delivered; some
    come twice, some are long past."""
    at, found = [0, 0], []
    for _ in range(draw(st.integers(1, 6))):
        rows = []
        for _ in range(draw(st.integers(1, 4))):
            index = draw(st.integers(0, 1))
            first = max(0, at[index] - draw(st.integers(0, 3)))
            count = draw(st.integers(1, 4))
            if first + count > len(ANSWER):
                continue
            at[index] = max(at[index], first + count)
            rows.append((index, first, count))
        found.append(rows)
    return found


def rows_of(emit: list[tuple[int, int, int]], name: RequestId = A) -> list[TokenRow]:
    return [(name, 1, index, first, ANSWER[first : first + count]) for index, first, count in emit]


def one_by_one(rows: list[TokenRow]) -> list[TokenRow]:
    """In both forms that a row of one token may have."""
    return [(*row[:4], row[4] if row[3] % 2 else [row[4]]) for row in each_token(rows)]


def asked(logprobs: int | None) -> GenerateRequest:
    return GenerateRequest(id=A, prompt=(1, 2, 3), n=2, sampling=SamplingParams(max_tokens=50, logprobs=logprobs))


def thoughts_of(rows: list[TokenRow]) -> list[tuple[RequestId, int, RowLogprobs]]:
    return [
        (request, index, RowLogprobs(index, 1, TokenLogprob(token, -float(position), 1)))
        for request, _, index, position, token in each_token(rows)
    ]


def delivered(emitted: list[Emit], logprobs: int | None) -> Delivered:
    got: Delivered = {0: ([], []), 1: ([], [])}

    async def main() -> None:
        def take(delta: Delta) -> None:
            got[delta.index][0].extend(delta.tokens)
            got[delta.index][1].extend(thought.logprob for thought in delta.logprobs)

        front, request = FrontMachine(), asked(logprobs)
        stream = Stream(request, take)
        front.handle(ClientRequest(request, stream), Instant(0.0))
        for emit in emitted:
            assert front.take(emit) == []
        assert {index: list(told) for index, told in front.ledgers[A].open.items()} == {index: got[index][0] for index in got}
        stream.done.cancel()
        await asyncio.sleep(0)

    finish(main())
    return got


@settings(max_examples=60, deadline=None)
@given(emits(), st.booleans())
def test_a_front_delivers_each_position_once(plan, with_logprobs: bool):
    logprobs = 1 if with_logprobs else None
    runs = [rows_of(rows) for rows in plan]
    several = [Emit(rows, [], thoughts_of(rows) if with_logprobs else []) for rows in runs]
    single = [Emit(one_by_one(rows), [], thoughts_of(rows) if with_logprobs else []) for rows in runs]
    ends = [max((first + count for row in plan for i, first, count in row if i == index), default=0) for index in (0, 1)]
    right = {index: ANSWER[:end] for index, end in enumerate(ends)}
    got, expected = delivered(several, logprobs), delivered(single, logprobs)
    assert got == expected
    assert {index: tokens for index, (tokens, _) in got.items()} == right
    if with_logprobs:
        assert {index: told for index, (_, told) in got.items()} == {
            i: [-float(p) for p in range(e)] for i, e in enumerate(ends)
        }


def test_what_was_cached_comes_with_the_first_token_and_once():
    """A replay finds more cached. Its client was told the number of the first attempt, and the end says the same."""
    deltas: list[Delta] = []

    async def main() -> None:
        request, front = GenerateRequest(id=A, prompt=(1, 2, 3)), FrontMachine()
        stream = Stream(request, deltas.append)
        front.handle(ClientRequest(request, stream), Instant(0.0))
        first = Emit([(A, 1, 0, 0, [5])], [], begun=[Begun(A, 1, 0, 2, 1, 0)])
        front.take(first)
        front.take(first)
        front.handle(EngineLost("killed"), Instant(0.5))
        (again,) = front.handle(EngineReady(b""), Instant(1.0))
        assert type(again) is Replay
        assert again.request.attempt == 2
        front.take(Emit([(A, 2, 0, 1, [6])], [], begun=[Begun(A, 2, 0, 3)]))
        front.take(Emit([], [Ended(A, 0, FinishReason.STOP, 3, 3, 2, 0, attempt=2)]))
        await stream.done

    finish(main())
    assert [(delta.tokens, delta.begun and delta.begun.cached_tokens) for delta in deltas] == [
        ([5], 2),
        ([6], None),
        ([], None),
    ]
    assert deltas[-1].ended is not None
    assert (deltas[-1].ended.cached_tokens, deltas[-1].ended.host_tokens) == (2, 1)
