"""Which instances there are, whether they live, and how much room they have.

    Join --fits--> ALIVE --1 s silent, or a fault--> SUSPECT (no new work) --2 s silent--> gone (given up)
                     ^------ says something ----------'
    Part, or another Join of the same name: gone at once
    says for 2 s that its worker stands still: SUSPECT as ever, and what it has is moved to others (router.py)

A session is one life: what comes from one that is gone is not heard. Room is what the last Beat said, less what was sent
since, plus what ended since. It is a guess that the next Beat corrects; the instance alone admits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.events import Session
from baton.core.cluster.paths import Paths
from baton.core.cluster.prefix_memory import PrefixMemory
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.node import Beat, NodeHello

HEALTHY_SECONDS: Final = 30.0
"""An instance that lived so long is not in a row of losses any more."""
FREE_LOSSES: Final = 2
INHIBIT_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)
"""After the third loss in a row, and so on: it is the last choice for so long after it is back."""


class Member:
    """One session of one instance."""

    __slots__ = (
        "beat",
        "blocks_since",
        "chosen",
        "heard_at",
        "held_until",
        "hello",
        "inhibited_until",
        "joined_at",
        "legs",
        "memory",
        "mode",
        "number",
        "overdrawn",
        "paths",
        "prompts",
        "sequences",
        "session",
        "slots_since",
        "stalled_since",
        "tokens_since",
    )

    def __init__(self, session: Session, hello: NodeHello, number: int, memory: PrefixMemory, now: Instant) -> None:
        self.session = session
        self.hello = hello
        self.number = number
        self.heard_at = self.joined_at = now
        self.beat = Beat(blocks_available=hello.ready.blocks, slots_free=hello.ready.slots)
        self.mode = "serving"
        self.memory = memory
        self.chosen = 0
        "When it was chosen last, as a counter: round robin, and who goes first among equals."
        self.held_until = now
        "Gets no new work before: it has just said that it takes none."
        self.inhibited_until = now
        self.legs: dict[RequestId, None] = {}
        "Requests that it has, whole or a part, in the order in which they came."
        self.paths = Paths()
        "Whom it cannot read from."
        self.prompts = 0
        "Hand-offs whose prompt it computes, or will."
        self.sequences = 0
        "Sequences that it answers."
        self.overdrawn: dict[RequestId, None] = {}
        "Those that were sent although there was no room; they wait there, and have no token yet."
        self.blocks_since = self.slots_since = self.tokens_since = 0
        "What changed since the last beat."
        self.stalled_since: Instant | None = None
        "Since when its beats say that its worker stands still."

    def __repr__(self) -> str:
        return f"<{self.hello.role} {self.hello.name}/{self.session} {len(self.legs)} legs>"

    @property
    def name(self) -> str:
        return self.hello.name

    # Credits

    @property
    def blocks_available(self) -> int:
        return min(self.beat.blocks_available + self.blocks_since, self.hello.ready.blocks)

    @property
    def slots_free(self) -> int:
        """Also by our own count, which is exact where we are the only router."""
        slots = self.hello.ready.slots
        return min(self.beat.slots_free + self.slots_since, slots - self.sequences)

    @property
    def waiting_tokens(self) -> int:
        """To be computed there, before what is sent next."""
        return max(0, self.beat.waiting_tokens + self.tokens_since)

    @property
    def held_tokens(self) -> int:
        ready = self.hello.ready
        return (ready.blocks - max(0, self.blocks_available)) * ready.block_size

    def on_beat(self, beat: Beat) -> None:
        self.beat = beat
        self.blocks_since = self.slots_since = self.tokens_since = 0

    def can_hold(self, tokens: int) -> bool:
        """Could it ever, with nothing else there?"""
        ready = self.hello.ready
        return -(-(tokens - 1) // ready.block_size) <= ready.blocks and not 0 < ready.context_tokens < tokens

    def is_suspect(self, now: Instant, seconds: float) -> bool:
        return now - self.heard_at >= seconds or bool(self.beat.fault)


class Loss(NamedTuple):
    """The last one of an instance."""

    in_a_row: int
    at: Instant
    hello: NodeHello | None
    "As what it may come back. None: it has come back as something else."


class Membership:
    __slots__ = ("_config", "_lapse_at", "_losses", "_nobody_since", "_numbers", "_stalled", "_stalls_seen", "members", "names")

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.members: dict[Session, Member] = {}
        self.names: dict[str, Member] = {}
        self._numbers = count(1)
        self._lapse_at: Instant | None = None
        "Nobody has been silent for too long before that. A lower bound: whoever speaks does not move it."
        self._losses: dict[str, Loss] = {}
        "Of a name: its last loss. At most instances_max."
        self._stalled: dict[Session, Member] = {}
        "Those whose worker stands still."
        self._stalls_seen = False
        "They were looked at, and nobody has said anything about itself since."
        self._nobody_since: Instant | None = None
        "Since when nobody is here. None: somebody is, or nobody has knocked yet."

    # Who is there

    def knock(self, now: Instant) -> None:
        """Somebody wants to join. Where nobody was ever here, the others are waited for from now on."""
        if not self.members and self._nobody_since is None:
            self._nobody_since = now

    def misfit(self, hello: NodeHello, now: Instant) -> str:
        """Why it cannot work beside those that are here, or were a moment ago. Empty: it can. The first one says what fits."""
        if len(self.members) >= self._config.instances_max and hello.name not in self.names:
            return f"there are {len(self.members)} instances already"
        if hello.adopt_seconds_max >= self._config.handing_seconds_max:
            return (
                f"it may take {hello.adopt_seconds_max:g} s to go on with a prompt (pull_seconds_max + release_seconds_max), "
                f"and the router gives up after {self._config.handing_seconds_max:g} s (handing_seconds_max)"
            )
        for member in self.members.values():
            return _disagreement(hello, member.hello)  # they agree with each other
        return self._too_early(hello, now)

    def _too_early(self, hello: NodeHello, now: Instant) -> str:
        """Nobody is here. One that does not fit those that were, or did not before, lets them come back first: else the loss of
        all, or a router that is started again, would make a stray instance the cluster, and the cluster strays. Those that
        have come back with other weights themselves are not waited for."""
        seconds = self._config.no_instance_seconds
        for name, loss in self._losses.items():
            wait = loss.at + seconds - now
            if name != hello.name and wait > 0 and loss.hello is not None and (why := _disagreement(hello, loss.hello)):
                return f"{why}, and {name} may come back within {wait:.0f} s"
        wait = 0.0 if self._nobody_since is None else self._nobody_since + seconds - now
        if hello.refused and wait > 0:
            return f"it was refused before, and those that it did not fit may come back within {wait:.0f} s"
        return ""

    def refuse(self, hello: NodeHello) -> None:
        """It does not fit. Where it did before it was lost, nobody waits for it as it was."""
        loss = self._losses.get(hello.name)
        if loss is not None and loss.hello is not None and _disagreement(hello, loss.hello):
            self._losses[hello.name] = loss._replace(hello=None)

    def join(self, session: Session, hello: NodeHello, now: Instant) -> Member:
        """It fits, and nobody of its name is here."""
        if session in self.members or hello.name in self.names:
            raise InvariantBroken(f"session {session} of {hello.name} has joined already", invariant=17)
        memory = PrefixMemory(min(self._config.prefix_memory_blocks, max(1, hello.ready.blocks)))
        member = Member(session, hello, next(self._numbers), memory, now)
        before = self._losses.get(hello.name)
        if before is not None and before.in_a_row > FREE_LOSSES:
            place = min(before.in_a_row - FREE_LOSSES, len(INHIBIT_SECONDS)) - 1
            member.inhibited_until = Instant(now + INHIBIT_SECONDS[place])
        self.members[session] = self.names[hello.name] = member
        self._nobody_since = None
        self._stalls_seen = False
        self._look_again()
        return member

    def remove(self, member: Member, now: Instant, *, reloaded: bool = False) -> None:
        """`reloaded`: by order, to come back with other weights."""
        del self.members[member.session]
        del self.names[member.name]
        self._nobody_since = None if self.members else now
        self._stalled.pop(member.session, None)
        for other in self.members.values():
            other.paths.forget(member.session)
        before = self._losses.pop(member.name, None)
        if reloaded:
            self._losses.clear()  # whoever was lost before does not fit the new ones: nobody waits for that
        elif member.mode == "serving":  # not one that was stopped with care
            in_a_row = before.in_a_row if before is not None and now - member.joined_at < HEALTHY_SECONDS else 0
            self._losses[member.name] = Loss(in_a_row + 1, now, member.hello)
        while len(self._losses) > self._config.instances_max:
            del self._losses[next(iter(self._losses))]

    def hear(self, session: Session, now: Instant) -> Member | None:
        """Whoever says something lives. None: nobody whom we know."""
        member = self.members.get(session)
        if member is not None:
            member.heard_at = now
        return member

    def on_beat(self, member: Member, beat: Beat, now: Instant) -> None:
        member.on_beat(beat)
        if not beat.stalled:
            member.stalled_since = None
            self._stalled.pop(member.session, None)
        elif member.stalled_since is None:
            member.stalled_since = now
            self._stalled[member.session] = member
        self._stalls_seen = False

    # Who may get work

    def usable(self, now: Instant) -> list[Member]:
        seconds = self._config.suspect_seconds
        return [
            member
            for member in self.members.values()
            if member.mode == "serving" and member.held_until <= now and not member.is_suspect(now, seconds)
        ]

    @property
    def all_paused(self) -> str:
        """The mode of all, if nobody serves on purpose. Empty: somebody does, or nobody is here."""
        modes = [member.mode for member in self.members.values()]
        return modes[0] if modes and "serving" not in modes else ""

    # Time

    def silent(self, now: Instant) -> list[Member]:
        """Those to be given up."""
        if self._lapse_at is None or self._lapse_at > now:
            return []
        lapse = self._config.lapse_seconds
        found = [member for member in self.members.values() if member.heard_at + lapse <= now]
        self._look_again(found)
        return found

    def stalled(self, now: Instant) -> list[Member]:
        """Those whose requests are to be moved to others. They are not told again before somebody has said something about
        itself: where nobody else works now, somebody may then."""
        due = [member for member in self._stalled.values() if self._move_at(member) <= now and member.legs]
        self._stalls_seen = bool(due)
        return due

    def _move_at(self, member: Member) -> Instant:
        since = member.stalled_since
        return Instant(float("inf") if since is None else since + self._config.lapse_seconds)

    def next_deadline(self) -> Instant | None:
        if not self._stalled or self._stalls_seen:
            return self._lapse_at
        times = [self._move_at(member) for member in self._stalled.values() if member.legs]
        return min(times if self._lapse_at is None else [*times, self._lapse_at])

    def _look_again(self, gone: Sequence[Member] = ()) -> None:
        heard = [member.heard_at for member in self.members.values() if member not in gone]
        self._lapse_at = Instant(min(heard) + self._config.lapse_seconds) if heard else None

    def check(self) -> None:
        if len(self.members) != len(self.names) or len(self.members) > self._config.instances_max:
            raise InvariantBroken("sessions and names of instances do not match", invariant=49)
        if self.members and self._lapse_at is None:
            raise InvariantBroken("nobody looks whether instances live", invariant=41)
        if any(self.members.get(session) is not member for session, member in self._stalled.items()):
            raise InvariantBroken("somebody who is gone stands still", invariant=49)
        if len(self._losses) > self._config.instances_max:
            raise InvariantBroken("too many names of lost instances are remembered", invariant=49)
        for member in self.members.values():
            if len(member.memory) > member.memory.blocks_max:
                raise InvariantBroken(f"{member!r} remembers {len(member.memory)} keys", invariant=49)
            if len(member.paths) >= len(self.members):
                raise InvariantBroken(f"{member!r} remembers {len(member.paths)} that it cannot read from", invariant=49)


def _disagreement(hello: NodeHello, other: NodeHello) -> str:
    """Why these two cannot be in one cluster. Empty: they can."""
    ready, theirs = hello.ready, other.ready
    for what, mine, its in (
        _identity_part(ready, theirs),
        ("block size", ready.block_size, theirs.block_size),
        ("vocabulary", ready.vocab_size, theirs.vocab_size),
        ("context of the model", ready.model_context_tokens, theirs.model_context_tokens),
        ("layout of KV blocks", hello.layout.hex(), other.layout.hex()),
    ):
        if mine != its:
            return f"{what} is {mine}, that of {other.name} is {its}: all instances of a cluster must agree"
    return ""


def _identity_part(ready: InstanceReady, theirs: InstanceReady) -> tuple[str, str, str]:
    """The first part of the identity that differs, where both sides have sent the parts; else the digests."""
    if ready.identity != theirs.identity:
        for name, part in ready.identity_parts.items():
            other = theirs.identity_parts.get(name, part)
            if other != part:
                return f"{name} of the KV identity", part, other
    return "identity", ready.identity.hex(), theirs.identity.hex()
