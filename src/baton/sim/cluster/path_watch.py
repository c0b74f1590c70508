"""58: a pair whose copies do not arrive is not used for a while, and no other. Judged by the messages of one router.

    all of r was offered, and D continues with less than half   -->  in vain, unless P kept nothing or denied the release
    three times in a row between P and D                        -->  not tried for 2 s, then 4, ... 64
    r is placed on P and D within that time                     -->  wrong: its prompt would be computed twice
    P and D are given up, and it was not three times in a row   -->  wrong

Whether about half has arrived depends on the router's count at that moment: such a copy may count either way.
"""

from __future__ import annotations

from typing import Any, Final

from baton.core.cluster.events import Session
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, Forget, Offer, Prefill, Released, Reserve
from baton.sim.cluster.watch import ClusterWatch

DRIFT: Final = 1.02
IN_VAIN_MAX: Final = 2
UNSURE_TOKENS: Final = 4


class Pair:
    """A decode instance and an instance that prefills for it."""

    __slots__ = ("given_up_at", "in_vain", "perhaps_in_vain", "until")

    def __init__(self) -> None:
        self.in_vain = self.perhaps_in_vain = 0
        "Number of failures in a row, at least and at most."
        self.given_up_at = self.until = float("-inf")


class Copy:
    """An attempt to hand a request over."""

    __slots__ = ("at", "attempt", "decoder", "denied", "offered", "source")

    def __init__(self, attempt: int, decoder: Session, at: float) -> None:
        self.attempt, self.decoder, self.at = attempt, decoder, at
        self.source: Session | None = None
        self.offered: int | None = None
        "Number of tokens of the whole prompt."
        self.denied = False


class PathWatch:
    def __init__(self, watch: ClusterWatch) -> None:
        self._watch = watch
        self._copies: dict[str, Copy] = {}
        self._pairs: dict[tuple[Session, Session], Pair] = {}
        self._given_up = 0

    def clear(self) -> None:
        """Forget everything: the router restarts."""
        self._copies.clear()
        self._pairs.clear()
        self._given_up = 0

    # Messages of the router

    def sent(self, session: Session, message: Any, now: float) -> None:
        match message:
            case Reserve(request=request):
                copy = self._copies.get(request.id)
                if copy is None or copy.attempt != request.attempt:  # a lease renewal repeats the attempt
                    self._copies[request.id] = Copy(request.attempt, session, now)
            case Prefill(request=request) if (copy := self._copies.get(request.id)) is not None:
                copy.source = session
                pair = self._pairs.get((copy.decoder, session))
                if pair is not None and pair.given_up_at < copy.at < pair.until:
                    raise InvariantBroken(f"{request.id} is handed over where {pair.in_vain} were in vain", invariant=58)
            case Released(kept=False):
                self._deny(message.request)
            case Forget():
                copy = self._copies.get(message.request)
                if copy is not None and copy.decoder == session:
                    del self._copies[message.request]

    # Messages to the router

    def received(self, session: Session, message: Any, now: float) -> None:
        match message:
            case Released(kept=False):
                self._deny(message.request)
            case Offer(last=True) if (copy := self._copies.get(message.request)) is not None:
                if (copy.attempt, copy.source) == (message.attempt, session):
                    copy.offered = message.tokens
            case Adopted() if (copy := self._copies.get(message.request)) is not None:
                if (copy.attempt, copy.decoder) == (message.attempt, session):
                    del self._copies[message.request]
                    self._adopted(copy, message.tokens, now)

    def given_up(self, count: int) -> None:
        """Check the number of failed paths. `count`: pairs that the router has given up since its start."""
        if count == self._given_up:
            return
        self._given_up = count
        self._watch.saw("a pair was given up, as copies did not arrive")
        if not any(pair.perhaps_in_vain > IN_VAIN_MAX for pair in self._pairs.values()):
            raise InvariantBroken("a pair is given up that has not failed three times in a row", invariant=58)

    def gone(self, session: Session) -> None:
        """Forget the instance, which is gone. An instance that joins in its place is another one."""
        for pair in [pair for pair in self._pairs if session in pair]:
            del self._pairs[pair]

    def _deny(self, request: str) -> None:
        if (copy := self._copies.get(request)) is not None:
            copy.denied = True

    def _adopted(self, copy: Copy, tokens: int, now: float) -> None:
        if copy.source is None or copy.offered is None:
            return
        pair = self._pairs.setdefault((copy.decoder, copy.source), Pair())
        if not copy.offered:  # the source kept nothing: no fault of the path
            pair.until = float("-inf")
            return
        more_than_half = 2 * tokens - copy.offered
        if more_than_half > -UNSURE_TOKENS:  # a copy that began before arrives, so the path works again
            pair.until = float("-inf")
        if more_than_half > UNSURE_TOKENS:
            pair.in_vain = pair.perhaps_in_vain = 0
        elif more_than_half > -UNSURE_TOKENS or copy.denied:
            pair.in_vain = 0
            pair.perhaps_in_vain += 1
        else:
            pair.in_vain += 1
            pair.perhaps_in_vain += 1
            if pair.in_vain > IN_VAIN_MAX:
                pair.given_up_at = now
                pair.until = now + 2.0 * 2 ** min(pair.in_vain - IN_VAIN_MAX - 1, 5) / DRIFT
