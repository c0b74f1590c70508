"""Callers of an engine: its own front, and the session of every router (router_links.py).

Callers do not know each other: two may use the same request id, or the same number of an order. The engine has its own.

    caller                      engine
    request "r1"        <-->    "3|r1"      3 is the caller's tag. It identifies the receiver of an answer without a table
    order 7, ping 7     <-->    42          remembered until it is answered

The tag of a session is never used again. Later output for requests of an ended session is dropped, and the same request in the
next session is a new one to the instance. An engine that has a front and no routers uses ids as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, Protocol

from msgspec.structs import replace

from baton.core.effects import Refuse
from baton.core.events import Abort, CallerLeft, Event, ForgetCache, HoldPause, Pause, Resume, Sleep, Submit
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    ClearCache,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest

MARK: Final = "|"
UNANSWERED_MAX: Final = 256
"""Maximum of unanswered orders, or pings, of all callers."""

ToRouter = Reserved | Offer | Release | Released | Adopted
"""Effects that are sent unchanged to the request's caller."""


class CalledEngine(Protocol):
    """Methods of the engine that callers use. Numbers are the engine's own."""

    def dispatch(self, event: Event) -> None: ...

    def ping(self, number: int) -> None: ...

    def wake(self, number: int, model: str) -> None: ...

    def open_requests(self) -> Iterable[RequestId]:
        """Requests of all callers: running, waiting, or kept for another instance."""
        ...


class Caller:
    __slots__ = ("_prefix", "send", "tag")

    def __init__(self, tag: str, send: Callable[[Message], None]) -> None:
        self.tag = tag
        self.send = send
        self._prefix = f"{tag}{MARK}" if tag else ""

    def ours(self, request: RequestId) -> RequestId:
        return RequestId(self._prefix + request)

    def owns(self, request: RequestId) -> bool:
        return request.startswith(self._prefix)

    def own_ids(self, requests: Iterable[RequestId]) -> tuple[RequestId, ...]:
        """The requests of this caller, by its own ids."""
        return tuple(RequestId(request[len(self._prefix) :]) for request in requests if self.owns(request))


class Callers:
    def __init__(self, engine: CalledEngine) -> None:
        self._engine = engine
        self._untagged: Caller | None = None
        self._tagged: dict[str, Caller] = {}
        self._tags = count(1)
        self.leaving: Callable[[], bool] = lambda: False
        "Whether the instance is ending, and drains for its routers."
        self._orders = Numbers()
        self._pings = Numbers()

    def add(self, send: Callable[[Message], None], *, alone: bool = False) -> Caller:
        """Add a caller. `alone`: the only caller of this engine, whose ids stay as they are."""
        caller = Caller("" if alone else str(next(self._tags)), send)
        if alone:
            self._untagged = caller
        else:
            self._tagged[caller.tag] = caller
        return caller

    def remove(self, caller: Caller) -> None:
        """The caller has disconnected: end its requests and orders without an answer. A pause that it holds ends too."""
        if self._tagged.pop(caller.tag, None) is None:
            return
        self._orders.forget(caller)
        self._pings.forget(caller)
        for request in [request for request in self._engine.open_requests() if caller.owns(request)]:
            self._engine.dispatch(Abort(request))
        self._engine.dispatch(CallerLeft(caller.tag))

    def send_all(self, message: Message) -> None:
        for caller in [*self._tagged.values(), *([self._untagged] if self._untagged is not None else [])]:
            caller.send(message)

    # In

    def on_message(self, caller: Caller, message: Message) -> None:
        """Translate a message of a caller into an event of the machine, with the engine's own request ids and numbers."""
        match message:
            case GenerateRequest():
                self._engine.dispatch(Submit(self._owned(caller, message)))
            case GenerateBatch():
                for request in message.requests():
                    self._engine.dispatch(Submit(self._owned(caller, request)))
            case AbortRequest(id_, index, reason):
                ours = caller.ours(RequestId(id_))
                self._engine.dispatch(Abort(ours, index, FinishReason.STOP if reason == "stop" else FinishReason.ABORT))
            case Reserve() | Prefill():
                self._engine.dispatch(replace(message, request=self._owned(caller, message.request)))
            case PeerOffer(offer):
                self._engine.dispatch(replace(message, offer=replace(offer, request=caller.ours(offer.request))))
            case Release() | Released() | Forget():
                self._engine.dispatch(replace(message, request=caller.ours(message.request)))
            case Ping():
                self._on_ping(caller, message.number)
            case PauseInstance() | ResumeInstance() | SleepInstance() | WakeInstance() | ClearCache():
                self._on_order(caller, message)

    def _owned(self, caller: Caller, request: GenerateRequest) -> GenerateRequest:
        return replace(request, id=caller.ours(request.id)) if caller.tag else request

    def _on_ping(self, caller: Caller, callers_number: int) -> None:
        number = self._pings.add(caller, callers_number)
        if number is None:
            caller.send(Pong(callers_number, "the worker leaves many questions unanswered"))
        else:
            self._engine.ping(number)

    def _on_order(
        self, caller: Caller, order: PauseInstance | ResumeInstance | SleepInstance | WakeInstance | ClearCache
    ) -> None:
        """Dispatch an order of a caller under a number of the engine's own. Answered at once if the instance is ending, or has
        too many."""
        if isinstance(order, ResumeInstance) and self.leaving():
            # A resume of the cluster is meant for the instances that stay. This one keeps draining: a new request would be
            # dropped at its end.
            # dropped at its end.
            caller.send(OrderAnswer(order.number, "done", "the instance is ending: it takes no more requests"))
            return
        number = self._orders.add(caller, order.number)
        if number is None:
            caller.send(OrderAnswer(order.number, "refused", "too many orders are under way"))
            return
        match order:
            case PauseInstance(_, seconds, held):
                self._engine.dispatch(Pause(seconds, number))
                if held:
                    self._engine.dispatch(HoldPause(caller.tag))
            case ResumeInstance():
                self._engine.dispatch(Resume(number))
            case SleepInstance():
                self._engine.dispatch(Sleep(number))
            case ClearCache(_, device, host):
                self._engine.dispatch(ForgetCache(number, device, host))
            case WakeInstance(_, model):
                self._engine.dispatch(HoldPause(caller.tag))  # its caller resumes when all instances are awake
                self._engine.wake(number, model)

    # Out

    def caller_of_order(self, number: int) -> Caller | None:
        """The caller of an order that is not answered yet."""
        return self._orders.asker(number)

    def answer(self, answer: OrderAnswer | Pong) -> None:
        numbers = self._pings if isinstance(answer, Pong) else self._orders
        if (asked := numbers.take(answer.number)) is not None:
            caller, number = asked
            caller.send(replace(answer, number=number))

    def answer_pings(self, fault: str) -> None:
        """Answer all pings: the pinged worker is lost."""
        for number in self._pings.numbers():
            self.answer(Pong(number, fault))

    def refuse(self, refuse: Refuse) -> None:
        if (found := self._find(refuse.request)) is not None:
            caller, request = found
            caller.send(RefusedRequest(request, refuse.refused, refuse.attempt))

    def forward(self, message: ToRouter) -> None:
        """Send the message to the caller of its request, with the caller's own id. Dropped if the caller has disconnected."""
        if (found := self._find(message.request)) is not None:
            caller, request = found
            caller.send(replace(message, request=request))

    def _find(self, ours: RequestId) -> tuple[Caller, RequestId] | None:
        """The caller of a request and its own id for it. None: the caller has disconnected."""
        if self._untagged is not None:
            return self._untagged, ours
        tag, _, request = ours.partition(MARK)
        caller = self._tagged.get(tag)
        return None if caller is None else (caller, RequestId(request))

    def emit(self, emit: Emit) -> None:
        """Split an emit by caller. Rows of disconnected callers are dropped."""
        if self._untagged is not None:
            self._untagged.send(emit)
            return
        parts: dict[str, Emit] = {}

        def part(tag: str) -> Emit:
            if (known := parts.get(tag)) is None:
                known = parts[tag] = Emit([], [], [], [])
            return known

        last, tokens = "", part("").tokens
        for ours, attempt, index, position, tokens_of_row in emit.tokens:
            tag, _, request = ours.partition(MARK)
            if tag != last:
                last, tokens = tag, part(tag).tokens
            tokens.append((RequestId(request), attempt, index, position, tokens_of_row))
        for ours, index, row in emit.logprobs:
            tag, _, request = ours.partition(MARK)
            part(tag).logprobs.append((RequestId(request), index, row))
        for begun in emit.begun:
            tag, _, request = begun.request.partition(MARK)
            part(tag).begun.append(replace(begun, request=RequestId(request)))
        for ended in emit.ended:
            tag, _, request = ended.request.partition(MARK)
            part(tag).ended.append(replace(ended, request=RequestId(request)))
        for tag, emitted in parts.items():
            if (caller := self._tagged.get(tag)) is not None:
                caller.send(emitted)


class Numbers:
    """Maps the engine's numbers of orders or pings to the callers' own."""

    __slots__ = ("_asked", "_next")

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Caller, int]] = {}
        self._next = count(1)

    def add(self, caller: Caller, callers_number: int) -> int | None:
        """Return the engine's number. None: too many wait for their answer already."""
        if len(self._asked) >= UNANSWERED_MAX:
            return None
        number = next(self._next)
        self._asked[number] = caller, callers_number
        return number

    def asker(self, number: int) -> Caller | None:
        asked = self._asked.get(number)
        return None if asked is None else asked[0]

    def take(self, number: int) -> tuple[Caller, int] | None:
        return self._asked.pop(number, None)

    def numbers(self) -> list[int]:
        return list(self._asked)

    def forget(self, caller: Caller) -> None:
        for number in [number for number, (asker, _) in self._asked.items() if asker is caller]:
            del self._asked[number]
