"""Log-probabilities as delivered to clients: 51 of docs/internals/reliability.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.errors import InvariantBroken
from baton.protocol.output import Emit, each_token
from baton.protocol.step import TokenLogprob
from baton.sim.simulated_request import SimulatedRequest


class LogprobWatch:
    def __init__(self, client_requests: Mapping[str, SimulatedRequest], saw: Callable[[str], None]) -> None:
        self._requests = client_requests
        self._saw = saw

    def sent(self, emit: Emit) -> dict[tuple[str, int], list[TokenLogprob]]:
        """51: log-probabilities of prompts are right, and only delivered if wanted. Returns those of tokens, in order."""
        sent: dict[tuple[str, int], list[TokenLogprob]] = {}
        for request, index, row in emit.logprobs:
            client_request = self._requests[request]
            prompt = client_request.client.prompt
            if row.sampled is not None:
                sent.setdefault((request, index), []).append(row.sampled)
            if row.prompt:
                _expect(client_request.client.prompt_logprobs is not None, 51, f"{request} did not ask about its prompt")
            for place, entry in enumerate(row.prompt, row.prompt_from):
                known = 0 < place < len(prompt) and entry.token == prompt[place]
                by = tuple(
                    w
                    for w in client_request.weights_known
                    if known and client_request.oracles_of(w)[index].logprob(place) == entry.logprob
                )
                if not by:
                    raise InvariantBroken(f"{request}.{index}: the log-probability of prompt token {place}", invariant=51)
                client_request.prompt_places[place] = by
        for (request_id, index), entries in sent.items():
            tokens = [row[4] for row in each_token(emit.tokens) if (row[0], row[2]) == (request_id, index)]
            _expect(tokens == [e.token for e in entries], 51, f"{request_id}.{index}: log-probabilities of other tokens")
        return sent

    def expect(self, client_request: SimulatedRequest, index: int, position: int, sent: TokenLogprob | None) -> None:
        """51: each token comes with its own log-probability, if wanted, and the first one after the whole prompt's."""
        client, oracle = client_request.client, client_request.oracles[index]
        wanted = None
        if client.logprobs is not None:
            if not position:
                self._saw("a log-probability was delivered")
            wanted = (oracle.tokens[position], oracle.logprob(len(client.prompt) + position))
        if (sent and (sent.token, sent.logprob)) != wanted:
            raise InvariantBroken(
                f"{client_request.name}.{index}: token {position} comes with {sent}, not {wanted}", invariant=51
            )
        if client.prompt_logprobs is not None and index == 0 and position == 0:
            self._saw("a prompt's log-probabilities were delivered")
            whole = all((client_request.weights or 0) in by for by in client_request.prompt_places[1:])
            _expect(whole, 51, f"{client_request.name}: part of its prompt's log-probabilities is missing, or of other weights")


def _expect(ok: bool, invariant: int, message: str) -> None:
    if not ok:
        raise InvariantBroken(message, invariant=invariant)
