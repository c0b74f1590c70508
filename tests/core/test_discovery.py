"""Which routers an instance dials, from answers that come, change and fail."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from baton.core.discovery import (
    ADDRESSES_MAX,
    GONE_SECONDS,
    LOOKUP_SECONDS,
    LOOKUP_SECONDS_MIN,
    Dial,
    Discovery,
    DiscoveryEffect,
    DiscoveryEvent,
    DiscoveryTick,
    Found,
    GiveUp,
    LookUp,
    NotFound,
    SessionLost,
    SessionOpened,
    SourceChanged,
)
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant
from baton.sim.mutants import Mutant
from baton.sim.rest import check_empty

MUTANTS = [
    msgspec.convert(row, Mutant)
    for row in tomllib.loads((Path(__file__).parent.parent / "mutants" / "discovery.toml").read_text())["mutant"]
]


class Rig:
    def __init__(self, *sources: str, fixed: tuple[str, ...] = ()) -> None:
        self.machine = Discovery(fixed, sources)
        self.now = 0.0
        self.log: list[str] = []
        self.dialled: set[str] = set()

    def __call__(self, event: DiscoveryEvent, after: float = 0.0) -> list[DiscoveryEffect]:
        self.now += after
        effects = self.machine.handle(event, Instant(self.now))
        self.machine.check()
        for effect in effects:
            match effect:
                case Dial(address):
                    assert address not in self.dialled
                    self.dialled.add(address)
                case GiveUp(address):
                    self.dialled.remove(address)
                case SourceChanged(_, text):
                    self.log.append(text)
        return [effect for effect in effects if not isinstance(effect, SourceChanged)]

    @property
    def due(self) -> float | None:
        deadline = self.machine.next_deadline()
        return None if deadline is None else deadline - self.now


def test_fixed_addresses_are_dialled_for_ever_and_nothing_is_looked_up():
    rig = Rig(fixed=("a", "b"))
    assert rig(DiscoveryTick()) == [Dial("a"), Dial("b")]
    assert rig(SessionLost("a")) == rig(DiscoveryTick(), 1e6) == []
    assert rig.due is None


def test_every_address_is_dialled_and_looked_up_again():
    rig = Rig("dns")
    assert rig(DiscoveryTick()) == [LookUp("dns")]
    assert rig(DiscoveryTick(), 100.0) == [], "one lookup at a time, however long it takes"
    assert rig.due is None
    assert rig(Found("dns", ("b", "a"))) == [Dial("a"), Dial("b")]
    assert rig.due == LOOKUP_SECONDS
    assert rig(DiscoveryTick(), LOOKUP_SECONDS) == [LookUp("dns")]
    assert rig(Found("dns", ("a", "b", "c"))) == [Dial("c")]


def test_no_answer_an_empty_one_and_a_rotated_one_change_nothing_and_are_logged_once():
    rig = Rig("dns")
    for answer in [
        Found("dns", ("a", "b")),
        *[NotFound("dns", "no such name")] * 3,
        Found("dns", ()),
        Found("dns", ("b", "a")),
    ]:
        rig(DiscoveryTick(), LOOKUP_SECONDS)
        rig(answer)
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    rig(Found("dns", ("a", "b", "a")))
    assert rig.dialled == {"a", "b"}
    stay = "; routers stay as they were"
    assert rig.log == ["routers at a, b", "no such name" + stay, "it has no address" + stay, "routers at a, b"]


def test_an_address_without_a_session_is_given_up_at_once():
    rig = Rig("dns")
    rig(DiscoveryTick())
    rig(Found("dns", ("a", "b")))
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    assert rig(Found("dns", ("b",))) == [GiveUp("a")]


def test_an_open_session_lasts_a_while_after_its_address_is_gone():
    rig = Rig("dns")
    rig(DiscoveryTick())
    rig(Found("dns", ("a", "b", "c", "d")))
    for address in ("a", "b", "c"):
        rig(SessionOpened(address))
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    assert rig(Found("dns", ("d",))) == []
    assert rig(SessionLost("b"), 1.0) == [GiveUp("b")], "it is not dialled again"
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    assert rig(Found("dns", ("c", "d"))) == [], "a short answer ends no session"
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    rig(Found("dns", ("c", "d")), GONE_SECONDS - 2 * LOOKUP_SECONDS - 1.5)
    assert "a" in rig.dialled
    assert rig.due == 0.5
    assert rig(DiscoveryTick(), 0.5) == [GiveUp("a")]
    assert rig.dialled == {"c", "d"}


def test_a_lost_session_is_a_reason_to_look_soon_and_not_more_often():
    rig = Rig("dns", "file")
    rig(DiscoveryTick())
    rig(Found("dns", ("a",)))
    rig(Found("file", ("b",)))
    assert rig(SessionLost("a"), 0.25) == []
    assert rig.due == LOOKUP_SECONDS_MIN - 0.25
    assert rig(SessionLost("a"), 1.0) == [LookUp("dns")], "the other source is not concerned"
    assert rig(SessionLost("a")) == []
    rig(Found("dns", ("a",)))
    assert rig(SessionLost("stranger")) == []
    assert rig.due == LOOKUP_SECONDS - 1.25, "of the file"


def test_an_address_of_two_sources_is_dialled_once_and_kept_by_either():
    rig = Rig("dns", "file", fixed=("f",))
    assert rig(DiscoveryTick()) == [LookUp("dns"), LookUp("file"), Dial("f")]
    assert rig(Found("dns", ("a", "f"))) == [Dial("a")]
    assert rig(Found("file", ("a",))) == []
    rig(DiscoveryTick(), LOOKUP_SECONDS)
    assert rig(Found("dns", ("b",))) == [Dial("b")]
    assert rig(Found("file", ("c",))) == [Dial("c"), GiveUp("a")]
    assert "f" in rig.dialled


def test_a_source_has_a_bound():
    rig = Rig("dns")
    rig(DiscoveryTick())
    rig(Found("dns", tuple(f"{number:04}" for number in reversed(range(1000)))))
    assert rig.dialled == {f"{number:04}" for number in range(ADDRESSES_MAX)}
    assert rig.log[0].endswith(f"; {1000 - ADDRESSES_MAX} more are not dialled")


def test_the_check_finds_what_is_dialled_for_no_reason():
    rig = Rig("dns", fixed=("f",))
    rig(DiscoveryTick())
    rig.machine._dialled["x"] = rig.machine._dialled["f"]
    with pytest.raises(InvariantBroken, match="without a source"):
        rig.machine.check()
    rig.machine._dialled.clear()
    with pytest.raises(InvariantBroken, match="not dialled"):
        rig.machine.check()


ANSWERS_MAX = int(GONE_SECONDS / LOOKUP_SECONDS_MIN + 1)
"""Answers of a source whose addresses are dialled: the last one, and those within GONE_SECONDS whose sessions last."""


def check_rest(machine: Discovery, addresses: int) -> None:
    """`addresses`: different ones in the last answers, and fixed ones."""
    sources = len(machine._sources)
    bounds = {("Discovery", "_sources"): lambda _: sources, ("Discovery", "_dialled"): lambda _: addresses}
    check_empty(machine, bounds, tuple(bounds), ())


@pytest.mark.parametrize("seed", range(5))
def test_a_source_of_ever_new_addresses_has_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Every answer has other addresses, every dial opens a session, and sessions are lost, so that lookups are hastened."""
    most_of_one = 8  # of 64 addresses each, every check would go through thousands
    monkeypatch.setattr("baton.core.discovery.ADDRESSES_MAX", most_of_one)
    rng, rig = Random(seed), Rig("dns", fixed=("f",))
    most = 0
    for number in range(300):
        rig(DiscoveryTick(), rng.choice([LOOKUP_SECONDS_MIN, LOOKUP_SECONDS]))
        answer = tuple(f"{number}.{place}" for place in range(rng.choice([1, 6, 25])))
        for effect in rig(Found("dns", answer)):
            if isinstance(effect, Dial):
                rig(SessionOpened(effect.address))
        rig(SessionLost(rng.choice(answer[:1])))
        most = max(most, len(rig.machine._dialled))
    assert 5 * most_of_one < most <= 1 + most_of_one * ANSWERS_MAX
    rig(DiscoveryTick(), GONE_SECONDS)
    check_rest(rig.machine, 1 + min(len(answer), most_of_one))


def test_what_discovery_leaks_is_found():
    rig = Rig("dns", fixed=("f",))
    rig(DiscoveryTick())
    rig(Found("dns", ("a", "b")))
    check_rest(rig.machine, 3)
    with pytest.raises(InvariantBroken, match=r"Discovery\._dialled has 3 entries at rest, and may have 2"):
        check_rest(rig.machine, 2)
    rig.machine._lost = ["a"]  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken, match=r"Discovery\._lost has 1 entries"):
        check_rest(rig.machine, 3)


SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_last_answers_are_dialled(seed: int):
    draw(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_drawn_events(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    changed: dict[str, Any] = {"__name__": "baton.core.discovery"}
    exec(compile(mutant.change(mutant.path.read_text()), str(mutant.path), "exec"), changed)
    name = mutant.function.removeprefix("Discovery.")
    monkeypatch.setattr(getattr(Discovery, name), "__code__", getattr(changed["Discovery"], name).__code__)
    with pytest.raises((AssertionError, InvariantBroken)):
        draw_all()


def draw_all() -> None:
    for seed in SEEDS:
        draw(seed)


def draw(seed: int) -> None:
    """Against a plain oracle: the last answer that was not empty, and sessions of missing addresses for GONE_SECONDS."""
    rng, rig = Random(seed), Rig("dns", "file", fixed=("f",))
    last: dict[str, tuple[str, ...]] = {"dns": (), "file": ()}
    looking: list[str] = []
    missing: dict[str, float] = {}
    opened: set[str] = set()
    for _ in range(300):
        address = rng.choice("abcdf")
        event: DiscoveryEvent = rng.choice([DiscoveryTick(), SessionLost(address), SessionOpened(address)])
        if looking and rng.random() < 0.5:
            source = looking.pop(rng.randrange(len(looking)))
            answer = tuple(rng.sample("abcdf", rng.randrange(5)))
            event = rng.choice([Found(source, answer), NotFound(source, "?")])
            last[source] = answer if answer and isinstance(event, Found) else last[source]
        before, was = set(rig.dialled), rig.now
        looking += [effect.source for effect in rig(event, rng.choice([0.0, 0.5, 5.0, 30.0])) if isinstance(effect, LookUp)]
        assert len(looking) == len(set(looking))
        assert len(looking) == 2 or (rig.due is not None and rig.due <= LOOKUP_SECONDS), "a source is looked up, or will be"
        match event:
            case SessionOpened(name) if name in before:
                opened.add(name)
            case SessionLost(name):
                opened.discard(name)
        wanted = {"f", *last["dns"], *last["file"]}
        missing = {name: missing.get(name, rig.now) for name in before - wanted}
        kept = {name for name, since in missing.items() if name in opened and rig.now < since + GONE_SECONDS}
        assert rig.dialled == wanted | kept, (event, was)
        opened &= rig.dialled
    rig(DiscoveryTick(), GONE_SECONDS)
    check_rest(rig.machine, len(wanted))
