"""The front of one engine as a machine: no request is lost with the engine.

    ClientRequest -> SendRequest -> tokens (`take`) ... last end
                 EngineLost: sequences that are withdrawn or complete end; the others wait
                 EngineReady: Replay of open requests; with other weights, answers that have begun fail

Tokens are not events: `take` delivers them without an object per token. While an engine is connected, ClientWithdrawal leaves
`ledgers` unchanged, so a sink may withdraw its request from within `take`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from baton.core.delivery.ledger import Ledger
from baton.core.delivery.take import Sink, take
from baton.errors import EngineError, InvariantBroken, Unavailable
from baton.protocol.control import AbortRequest
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import OTHER_WEIGHTS, Delta, Emit
from baton.protocol.request import FinishReason, GenerateRequest, Refused

# Events


class ClientRequest(Struct, frozen=True):
    """A client sends a request; `sink` receives the answer."""

    request: GenerateRequest
    sink: Any


class ClientWithdrawal(Struct, frozen=True):
    """The client withdraws one sequence, or all. The end is delivered like any other."""

    request: RequestId
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


class Leave(Struct, frozen=True):
    """The client disconnected, or its sink failed: nothing more is delivered to this sink."""

    request: RequestId
    sink: Any


class Reject(Struct, frozen=True):
    """The engine refuses the request."""

    request: RequestId
    refused: Refused


class Unsendable(Struct, frozen=True):
    """The request could not be sent to the engine."""

    request: RequestId
    error: EngineError


class EngineLost(Struct, frozen=True):
    """The engine is lost, and another one is being started."""

    reason: str


class EngineReady(Struct, frozen=True):
    """An engine accepts requests: the first one, or the next one after a loss."""

    identity: bytes
    "Identity of the weights that the engine computes with."


class WeightsChanged(Struct, frozen=True):
    """The engine computes with other weights. It has ended the answers that had begun."""

    identity: bytes


class Close(Struct, frozen=True):
    """Close the front: every open request ends with this error, and so does every later one."""

    error: Exception


FrontEvent = ClientRequest | ClientWithdrawal | Leave | Reject | Unsendable | EngineLost | EngineReady | WeightsChanged | Close

# Effects


class SendRequest(Struct, frozen=True):
    """Send a new request to the engine."""

    request: GenerateRequest


class Replay(Struct, frozen=True):
    """Send the next attempt of a request to the engine."""

    request: GenerateRequest


class SendAbort(Struct, frozen=True):
    """Send this message after the request that it names."""

    message: AbortRequest


class End(Struct, frozen=True):
    """Deliver an end that no engine will report."""

    sink: Any
    delta: Delta


class FailClient(Struct, frozen=True):
    """End the request with this error."""

    sink: Any
    error: Exception


class RefuseClient(Struct, frozen=True):
    """Refuse the request; nothing of it has been delivered."""

    sink: Any
    refused: Refused


FrontEffect = SendRequest | Replay | SendAbort | End | FailClient | RefuseClient


class FrontMachine:
    __slots__ = ("_handlers", "_now", "away", "closed", "identity", "ledgers")

    def __init__(self) -> None:
        self.ledgers: dict[RequestId, Ledger] = {}
        "Open requests, in the order of their arrival."
        self.away: str | None = None
        "Reason why no engine is connected. None: an engine is connected."
        self.closed: Exception | None = None
        self.identity: bytes | None = None
        "Identity of the weights that the engine computes with. None: no engine has been ready yet."
        self._now = Instant(0.0)
        self._handlers: dict[type[Any], Any] = {
            ClientRequest: self._on_arrive,
            ClientWithdrawal: self._on_withdraw,
            Leave: self._on_leave,
            Reject: self._on_reject,
            Unsendable: lambda event: self._fail(event.request, event.error),
            EngineLost: self._on_lost,
            EngineReady: self._on_ready,
            WeightsChanged: self._on_weights,
            Close: self._on_close,
        }

    # The machine

    def handle(self, event: FrontEvent, now: Instant) -> list[FrontEffect]:
        self._now = now
        effects: list[FrontEffect] = self._handlers[type(event)](event)
        return effects

    def take(self, emit: Emit) -> list[FrontEffect]:
        """Deliver the new tokens. A request with a missing token ends: its answer would be wrong."""
        gaps = take(emit, self.ledgers)
        return [effect for ledger in gaps for effect in self._break(ledger)] if gaps else []

    def next_deadline(self) -> Instant | None:
        """Return None: the shell limits how long an engine may take to start."""
        return None

    def check(self) -> None:
        for ledger in self.ledgers.values():
            if not ledger.open:
                raise InvariantBroken(f"{ledger.id} has ended and is kept", invariant=22)
            if any(index not in ledger.open for index in ledger.withdrawn):
                raise InvariantBroken(f"{ledger.id} waits for the end of a sequence that has ended", invariant=22)
            if ledger.withdrawn and self.away is not None:
                raise InvariantBroken(f"{ledger.id} is withdrawn, and no engine is there to end it", invariant=22)
        if self.closed is not None and self.ledgers:
            raise InvariantBroken(f"the front is closed, and {len(self.ledgers)} requests are open", invariant=22)

    # Clients

    def _on_arrive(self, event: ClientRequest) -> list[FrontEffect]:
        request, sink = event.request, event.sink
        if self.closed is not None:
            return [FailClient(sink, self.closed)]
        if self.away is not None:
            return [FailClient(sink, Unavailable(self.away))]
        if request.id in self.ledgers:
            return [RefuseClient(sink, Refused("duplicate_id"))]
        self.ledgers[request.id] = Ledger(request, self._now, sink)
        return [SendRequest(request)]

    def _on_withdraw(self, event: ClientWithdrawal) -> list[FrontEffect]:
        ledger = self.ledgers.get(event.request)
        if ledger is None:
            return []
        ledger.withdraw(event.index, event.reason)
        if self.away is not None:
            return self._end_complete(ledger)
        return [SendAbort(AbortRequest(event.request, event.index, event.reason))]

    def _on_leave(self, event: Leave) -> list[FrontEffect]:
        ledger = self.ledgers.get(event.request)
        if ledger is None or ledger.sink is not event.sink:
            return []
        del self.ledgers[event.request]
        return [SendAbort(AbortRequest(event.request))] if self.away is None else []

    def _on_close(self, event: Close) -> list[FrontEffect]:
        self.closed = event.error
        ledgers, self.ledgers = self.ledgers, {}
        return [FailClient(ledger.sink, event.error) for ledger in ledgers.values()]

    # The engine

    def _on_reject(self, event: Reject) -> list[FrontEffect]:
        """Refuse a new request. A rejected replay is an answer that breaks off, so it fails."""
        ledger = self.ledgers.pop(event.request, None)
        if ledger is None:
            return []
        if ledger.attempt == ledger.request.attempt:
            return [RefuseClient(ledger.sink, event.refused)]
        why = f"the engine was lost, and the next one does not go on with the request: {event.refused}"
        return [FailClient(ledger.sink, Unavailable(why))]

    def _on_lost(self, event: EngineLost) -> list[FrontEffect]:
        self.away = event.reason
        return [effect for ledger in list(self.ledgers.values()) for effect in self._end_complete(ledger)]

    def _on_ready(self, event: EngineReady) -> list[FrontEffect]:
        other = self.identity not in (None, event.identity)
        self.identity = event.identity
        if self.away is None:
            return []
        self.away = None
        effects: list[FrontEffect] = []
        for ledger in list(self.ledgers.values()):
            if other and ledger.has_tokens:
                effects += self._fail(ledger.id, Unavailable(OTHER_WEIGHTS))
            else:
                ledger.attempt += 1
                effects.append(Replay(ledger.replay(self._now)))
        return effects

    def _on_weights(self, event: WeightsChanged) -> list[FrontEffect]:
        self.identity = event.identity
        return []

    # Ends

    def _end_complete(self, ledger: Ledger) -> list[FrontEffect]:
        """Deliver the ends of sequences that are withdrawn or complete: no engine will report them."""
        sink: Sink = ledger.sink
        ends: list[FrontEffect] = [End(sink, Delta(i, ended=ledger.end(i, reason))) for i, reason in ledger.over()]
        if not ledger.open:
            del self.ledgers[ledger.id]
        return ends

    def _fail(self, request: RequestId, error: Exception) -> list[FrontEffect]:
        ledger = self.ledgers.pop(request, None)
        return [] if ledger is None else [FailClient(ledger.sink, error)]

    def _break(self, ledger: Ledger) -> list[FrontEffect]:
        """Fail a request that misses a token, and abort it at the engine."""
        failed = self._fail(ledger.id, InvariantBroken(f"{ledger.id}: a token is missing before one that came", invariant=21))
        return [SendAbort(AbortRequest(ledger.id)), *failed] if failed else []
