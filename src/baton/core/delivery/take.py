"""Deliver the emits of an engine: rows of many requests in, one delta per sequence out.

take      checks each row against its request's ledger, and delivers new tokens
sift      removes from an emit what its client already has, or must not have
deliver   delivers an emit in which everything is new
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from baton.core.delivery.ledger import Ledger
from baton.protocol.ids import RequestId
from baton.protocol.output import Begun, Delta, Emit, Ended, TokenRow, tokens_of
from baton.protocol.step import RowLogprobs, TokenLogprob

LogprobRow = tuple[RequestId, int, RowLogprobs]


class Sink(Protocol):
    """Receives the answer of one request. A sink may withdraw its request at once, and never waits."""

    def deliver(self, delta: Delta) -> None: ...

    def add_prompt(self, row: RowLogprobs) -> None:
        """Log-probabilities or the embedding of the prompt, delivered with the next delta of sequence 0."""


def take(emit: Emit, ledgers: dict[RequestId, Ledger]) -> list[Ledger]:
    """Deliver the new tokens of an emit; return the ledgers that miss a token. Complete ledgers are removed.

    Hot: most emits have tokens only, one row for each of many sequences, and cost one call per row.
    """
    if emit.ended or emit.logprobs or emit.begun:
        return _take_gathered(emit, ledgers)
    gaps = []
    for row in emit.tokens:
        request, attempt, index, position, tokens = row
        ledger = ledgers.get(request)
        if ledger is None:
            continue
        given = ledger.open.get(index)
        if type(tokens) is int and given is not None and position == len(given) and attempt == ledger.attempt:
            given.append(tokens)  # Ledger.take without the call
            ledger.sink.deliver(Delta(index, [tokens]))
        elif attempt == ledger.attempt:
            if ledger.misses(row):
                gaps.append(ledger)
            elif (fresh := ledger.take(row)) is not None:
                ledger.sink.deliver(Delta(index, tokens_of(fresh[4])))
    return gaps


def _take_gathered(emit: Emit, ledgers: dict[RequestId, Ledger]) -> list[Ledger]:
    """Deliver an emit with ends, log-probabilities or begins: everything of a sequence goes into one delta."""
    gaps: list[Ledger] = []
    sinks: dict[RequestId, Sink] = {}

    def find(request: RequestId, attempt: int | None = None) -> Ledger | None:
        ledger = ledgers.get(request)
        if ledger is None or attempt not in (None, ledger.attempt):
            return None
        sinks[request] = ledger.sink
        return ledger

    def taken(row: TokenRow) -> TokenRow | None:
        ledger = find(row[0], row[1])
        if ledger is not None and ledger.misses(row):
            gaps.append(ledger)
            return None
        return None if ledger is None else ledger.take(row)

    def end(ended: Ended) -> Ended | None:
        ledger = find(ended.request, ended.attempt)
        if ledger is None or ended.index not in ledger.open:
            return None
        ledger.close(ended.index)
        if not ledger.open:
            del ledgers[ended.request]
        return ended

    owed = {row[0]: (ledger := find(row[0])) is not None and ledger.prompt_owed for row in emit.logprobs}
    deliver(sift(emit, owed, taken, end), sinks)
    return gaps


def sift(
    emit: Emit,
    owed: Mapping[RequestId, bool],
    taken: Callable[[TokenRow], TokenRow | None],
    end: Callable[[Ended], Ended | None],
) -> Emit:
    """Remove from an emit everything that is not new. `owed`: requests whose prompt log-probabilities have not been delivered.
    `taken` and `end` return the new part of a row or an end, and count it as delivered."""
    fresh: list[TokenRow] = []
    verdicts: dict[tuple[RequestId, int], deque[bool]] = {}
    for row in emit.tokens:
        new = taken(row)
        if new is not None:
            fresh.append(new)
        if emit.logprobs:
            count = 0 if new is None else len(tokens_of(new[4]))
            known = len(tokens_of(row[4])) - count
            verdicts.setdefault((row[0], row[2]), deque()).extend((False,) * known + (True,) * count)
    begun = begun_by(fresh, emit.begun)
    logprobs = [kept for row in emit.logprobs if (kept := _sifted(row, owed, verdicts)) is not None]
    ended = [fresh_end for each in emit.ended if (fresh_end := end(each)) is not None]
    return Emit(fresh, ended, logprobs, begun)


def begun_by(fresh: list[TokenRow], begun: list[Begun]) -> list[Begun]:
    """The entries of `begun` whose first token is in `fresh`."""
    first = {(row[0], row[2]) for row in fresh if not row[3]} if begun else ()
    return [each for each in begun if (each.request, each.index) in first]


def _sifted(
    row: LogprobRow, owed: Mapping[RequestId, bool], verdicts: dict[tuple[RequestId, int], deque[bool]]
) -> LogprobRow | None:
    """The new part of an emit's log-probabilities: a token's are delivered with it, those of the prompt once."""
    request, index, row_logprobs = row
    if row_logprobs.sampled is not None:
        verdict = verdicts.get((request, index))
        if not (verdict and verdict.popleft()):
            row_logprobs = replace(row_logprobs, sampled=None)
    if row_logprobs.prompt and not owed.get(request):
        row_logprobs = replace(row_logprobs, prompt_from=0, prompt=())
    if row_logprobs is row[2]:
        return row
    return (request, index, row_logprobs) if row_logprobs.sampled is not None or row_logprobs.prompt else None


def deliver(emit: Emit, sinks: Mapping[RequestId, Sink]) -> None:
    """Deliver an emit. Rows of a request without a sink are dropped."""
    if emit.ended or emit.logprobs or emit.begun:
        for (request, _), delta in _gathered(emit, sinks).items():
            if (sink := sinks.get(request)) is not None:
                sink.deliver(delta)
        return
    for request, _, index, _, tokens in emit.tokens:
        if (sink := sinks.get(request)) is not None:
            sink.deliver(Delta(index, [tokens] if type(tokens) is int else tokens_of(tokens)))


def _gathered(emit: Emit, sinks: Mapping[RequestId, Sink]) -> dict[tuple[RequestId, int], Delta]:
    """One delta per sequence: the last token goes with its end, a token with its log-probabilities."""
    deltas: dict[tuple[RequestId, int], Delta] = {}
    logprobs: dict[tuple[RequestId, int], list[TokenLogprob]] = {}
    for request, index, row in emit.logprobs:
        if index == 0 and (sink := sinks.get(request)) is not None:
            sink.add_prompt(row)
        if row.sampled is not None:
            logprobs.setdefault((request, index), []).append(row.sampled)
    for request, _, index, _, tokens in emit.tokens:
        delta = deltas.setdefault((request, index), Delta(index, [], []))
        delta.tokens += tokens_of(tokens)
    for key, delta in deltas.items():
        delta.logprobs = logprobs.get(key, [])
    for begun in emit.begun:
        if (known := deltas.get((begun.request, begun.index))) is not None:
            known.begun = begun
    for ended in emit.ended:
        deltas.setdefault((ended.request, ended.index), Delta(ended.index, [], [])).ended = ended
    return deltas
