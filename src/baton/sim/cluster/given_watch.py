"""Requests assigned to instances and not ended there (43): a sequence whose end is delivered continues nowhere.

GenerateRequest, Reserve, Prefill   the instance has these sequences
AbortRequest, Forget                the instance must end them
an end, a refusal, a release        the instance reports that it has ended them
"""

from __future__ import annotations

from typing import Any

from baton.core.cluster.events import Deliver, Session
from baton.errors import InvariantBroken
from baton.protocol.control import AbortRequest, RefusedRequest
from baton.protocol.handoff import Forget, Released, request_of
from baton.protocol.output import Emit


class GivenWatch:
    def __init__(self) -> None:
        self._given: dict[str, dict[Session, dict[int, None]]] = {}

    def clear(self) -> None:
        """Forget everything: the router restarts."""
        self._given.clear()

    def sent(self, session: Session, message: Any) -> None:
        match message:
            case Forget():
                self._given.get(message.request, {}).pop(session, None)
            case AbortRequest():
                sequences = self._given.get(message.request, {}).get(session, {})
                for index in list(sequences) if message.index is None else [message.index]:
                    sequences.pop(index, None)
            case _ if (request := request_of(message)) is not None:
                self._given.setdefault(request.id, {})[session] = dict.fromkeys(request.wanted)

    def received(self, session: Session, message: Any) -> None:
        match message:
            case RefusedRequest() | Released():
                self._given.get(message.request, {}).pop(session, None)
            case Emit():
                for ended in message.ended:
                    self._given.get(ended.request, {}).get(session, {}).pop(ended.index, None)

    def gone(self, session: Session) -> None:
        for sessions in self._given.values():
            sessions.pop(session, None)

    def after(self, effects: list[Any]) -> None:
        """Check after all effects of one event are performed."""
        for effect in effects:
            if type(effect) is Deliver:
                for ended in effect.emit.ended:
                    for session, sequences in self._given.get(ended.request, {}).items():
                        if ended.index in sequences:
                            raise InvariantBroken(
                                f"{ended.request}.{ended.index} has ended, and goes on in session {session}", invariant=43
                            )
