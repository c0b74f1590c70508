"""What clients are told of log-probabilities: 51 of docs/internals/reliability.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.errors import InvariantBroken
from baton.protocol.output import Emit, each_token
from baton.protocol.step import TokenLogprob
from baton.sim.trip import Trip


class LogprobWatch:
    def __init__(self, trips: Mapping[str, Trip], saw: Callable[[str], None]) -> None:
        self._trips = trips
        self._saw = saw

    def told(self, emit: Emit) -> dict[tuple[str, int], list[TokenLogprob]]:
        """51: what is told of prompts is true, and only those who asked are told. Returns what is told of tokens, in order."""
        told: dict[tuple[str, int], list[TokenLogprob]] = {}
        for request, index, row in emit.logprobs:
            trip = self._trips[request]
            prompt = trip.client.prompt
            if row.sampled is not None:
                told.setdefault((request, index), []).append(row.sampled)
            if row.prompt:
                _expect(trip.client.prompt_logprobs is not None, 51, f"{request} did not ask about its prompt")
            for place, entry in enumerate(row.prompt, row.prompt_from):
                known = 0 < place < len(prompt) and entry.token == prompt[place]
                by = tuple(w for w in trip.weights_known if known and trip.oracles_of(w)[index].logprob(place) == entry.logprob)
                if not by:
                    raise InvariantBroken(f"{request}.{index}: the log-probability of prompt token {place}", invariant=51)
                trip.prompt_places[place] = by
        for (request_id, index), entries in told.items():
            tokens = [row[4] for row in each_token(emit.tokens) if (row[0], row[2]) == (request_id, index)]
            _expect(tokens == [e.token for e in entries], 51, f"{request_id}.{index}: log-probabilities of other tokens")
        return told

    def expect(self, trip: Trip, index: int, position: int, told: TokenLogprob | None) -> None:
        """51: each token comes with its own, if that was asked for, and the first one after the whole prompt's."""
        client, oracle = trip.client, trip.oracles[index]
        wanted = None
        if client.logprobs is not None:
            if not position:
                self._saw("a log-probability was told")
            wanted = (oracle.tokens[position], oracle.logprob(len(client.prompt) + position))
        if (told and (told.token, told.logprob)) != wanted:
            raise InvariantBroken(f"{trip.name}.{index}: token {position} comes with {told}, not {wanted}", invariant=51)
        if client.prompt_logprobs is not None and index == 0 and position == 0:
            self._saw("a prompt's log-probabilities were told")
            whole = all((trip.weights or 0) in by for by in trip.prompt_places[1:])
            _expect(whole, 51, f"{trip.name}: part of its prompt's log-probabilities is missing, or of other weights")


def _expect(ok: bool, invariant: int, message: str) -> None:
    if not ok:
        raise InvariantBroken(message, invariant=invariant)
