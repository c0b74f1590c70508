"""Addresses of routers that an instance dials: fixed ones, and those of sources that change (a DNS name, a file).

    LookUp --> Found: new addresses are dialled. An address that is missing is not dialled again, and its session ends
           |          GONE_SECONDS later: one short answer of a name server ends no session
           `-> NotFound, or an empty answer: all addresses stay as they were

A source is looked up LOOKUP_SECONDS after its last answer, and sooner after a failed dial or a lost session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.errors import InvariantBroken
from baton.protocol.ids import Instant

LOOKUP_SECONDS: Final = 5.0
"""Seconds from an answer of a source to its next lookup."""
LOOKUP_SECONDS_MIN: Final = 1.0
"""Least seconds between lookups, after a failed dial or a lost session."""
GONE_SECONDS: Final = 60.0
"""Seconds for which a session may outlast its address: a router that leaves has requests open."""
ADDRESSES_MAX: Final = 64
"""Maximum of addresses per source. Others are not dialled."""


@dataclass(frozen=True, slots=True)
class Found:
    """A source answered."""

    source: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotFound:
    """A lookup failed."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class SessionOpened:
    address: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A session ended, or none could be opened."""

    address: str


@dataclass(frozen=True, slots=True)
class DiscoveryTick:
    pass


DiscoveryEvent = Found | NotFound | SessionOpened | SessionLost | DiscoveryTick


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look the source up; the answer is Found or NotFound."""

    source: str


@dataclass(frozen=True, slots=True)
class Dial:
    """Hold a session with this address until GiveUp."""

    address: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    address: str


@dataclass(frozen=True, slots=True)
class SourceChanged:
    """The log line of a source: once per change of its answer."""

    source: str
    text: str
    found: bool


DiscoveryEffect = LookUp | Dial | GiveUp | SourceChanged


class _Source:
    __slots__ = ("addresses", "answered", "due", "text")

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        "The last answer of the source that was not empty."
        self.answered = Instant(0.0)
        self.due: Instant | None = Instant(0.0)
        "Time of the next lookup. None: a lookup is running."
        self.text = ""
        "The last log line of the source."


class _Dialled:
    __slots__ = ("gone", "opened")

    def __init__(self) -> None:
        self.opened = False
        self.gone: Instant | None = None
        "Time since which the address's source does not have it. None: it has."


class Discovery:
    def __init__(self, fixed: Sequence[str], sources: Sequence[str]) -> None:
        self._fixed = tuple(fixed)
        self._sources = {source: _Source() for source in sources}
        self._dialled: dict[str, _Dialled] = {}

    def handle(self, event: DiscoveryEvent, now: Instant) -> list[DiscoveryEffect]:
        effects: list[DiscoveryEffect] = []
        match event:
            case Found(name, addresses):
                effects += self._on_answer(name, addresses, "it has no address", now)
            case NotFound(name, why):
                effects += self._on_answer(name, (), why, now)
            case SessionOpened(address) if address in self._dialled:
                self._dialled[address].opened = True
            case SessionLost(address) if address in self._dialled:
                self._dialled[address].opened = False
                self._hasten_lookup(address, now)
        return [*effects, *self._lookups_due(now), *self._reconcile(now)]

    def next_deadline(self) -> Instant | None:
        looks = [source.due for source in self._sources.values() if source.due is not None]
        ends = [Instant(one.gone + GONE_SECONDS) for one in self._dialled.values() if one.gone is not None]
        return min([*looks, *ends], default=None)

    def check(self) -> None:
        wanted = self._wanted_addresses()
        stray = [address for address, one in self._dialled.items() if (address in wanted) != (one.gone is None)]
        missing = [address for address in wanted if address not in self._dialled]
        if stray or missing:
            raise InvariantBroken(f"discovery: dialled without a source {stray}, not dialled {missing}")

    def _on_answer(self, name: str, addresses: tuple[str, ...], why: str, now: Instant) -> list[DiscoveryEffect]:
        source = self._sources[name]
        source.answered, source.due = now, Instant(now + LOOKUP_SECONDS)
        names = sorted({*addresses})  # name servers rotate their answers
        text = f"routers at {', '.join(names[:ADDRESSES_MAX])}" if names else f"{why}; routers stay as they were"
        if len(names) > ADDRESSES_MAX:
            text += f"; {len(names) - ADDRESSES_MAX} more are not dialled"
        if names:
            source.addresses = tuple(names[:ADDRESSES_MAX])
        if text == source.text:
            return []
        source.text = text
        return [SourceChanged(name, text, bool(names))]

    def _hasten_lookup(self, address: str, now: Instant) -> None:
        """Look up soon the sources that have this address: a dial failed, or a session was lost."""
        for source in self._sources.values():
            if source.due is not None and address in source.addresses:
                source.due = min(source.due, Instant(max(now, source.answered + LOOKUP_SECONDS_MIN)))

    def _lookups_due(self, now: Instant) -> list[DiscoveryEffect]:
        """Return a lookup for each source whose time has come."""
        due = [name for name, source in self._sources.items() if source.due is not None and source.due <= now]
        for name in due:
            self._sources[name].due = None
        return [LookUp(name) for name in due]

    def _wanted_addresses(self) -> dict[str, None]:
        """Fixed addresses, and those of all sources, in order and each once."""
        found = (address for source in self._sources.values() for address in source.addresses)
        return dict.fromkeys([*self._fixed, *found])

    def _reconcile(self, now: Instant) -> list[DiscoveryEffect]:
        """Dial addresses that are new, and give up those that no source has had for GONE_SECONDS, or that have no session."""
        effects: list[DiscoveryEffect] = []
        wanted = self._wanted_addresses()
        for address in wanted:
            if address in self._dialled:
                self._dialled[address].gone = None
            else:
                self._dialled[address] = _Dialled()
                effects.append(Dial(address))
        for address, one in list(self._dialled.items()):
            if address in wanted:
                continue
            one.gone = now if one.gone is None else one.gone
            if not one.opened or now >= one.gone + GONE_SECONDS:
                del self._dialled[address]
                effects.append(GiveUp(address))
        return effects
