"""The instance's side of the cluster: a session to every address of a router (router_sources.py), while the engine lives.

    dial --> InstanceHello --> RouterHello: open --> heartbeats, requests, tokens ... --> ended --> dial again, forever
                      `--> InstanceRefused: logged, tried again, slowly

A session ends with its connection, when the router breaks the protocol, and when no message of it has arrived within its
lapse_seconds. Then all its requests are aborted here; the router, or another one, begins them anew. Other sessions are not
affected.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

from msgspec.structs import replace

from baton.addresses import parse_address, reachable_url
from baton.config import WireConfig
from baton.core.discovery import SessionLost, SessionOpened
from baton.core.heartbeat_times import REQUESTS, HeartbeatTimes
from baton.core.kv.digest import DigestFeed
from baton.core.redial_times import DialOutcome, RedialTimes
from baton.errors import LinkFailed
from baton.protocol.codec import Message
from baton.protocol.control import InstanceStats, ModelChanged
from baton.protocol.instance import Heartbeat, InstanceHello, InstanceRefused, RouterHeartbeat, RouterHello
from baton.protocol.versions import CACHED_KEYS
from baton.repeats import printable
from baton.runtime.engine.callers import Caller, Callers
from baton.runtime.engine.router_sources import RouterSources
from baton.runtime.wire.link import WIRE, Link, dial
from baton.trust.credentials import Credentials

logger = logging.getLogger("baton.cluster")

SessionEvent = Literal["opened", "unreachable", "refused", "lapsed", "failed", "ended", "unknown_kind"]
"""opened: a router accepted us. unreachable: the dial or the handshake failed. refused: the router rejects us. Of open
sessions, lapsed: no message for too long; failed: a message broke the protocol; ended: by either side. unknown_kind: a message
of a newer router was skipped."""

BEAT_SECONDS: Final = 0.25
"""Interval of checks of our sessions, and of heartbeats unless a router wants more."""
BEAT_SECONDS_MIN: Final = 0.02
"""Least interval of heartbeats that a router gets (config/router.py refuses a shorter one too)."""
STATS_SECONDS: Final = 1.0
"""Interval of InstanceStats, which go with a heartbeat."""
EARLY_SECONDS: Final = 0.005
"""Seconds by which a heartbeat is sent early instead of at the next check."""
STALL_SECONDS: Final = 0.5
"""Delay of our check from which we count as stopped ourselves."""
LAPSE_SECONDS_MIN: Final = 0.5
"""Least lapse_seconds that a router gets: with a shorter one no session would last."""
LOG_AGAIN_SECONDS: Final = 60.0
"""Least seconds between two log lines about the same trouble with the same router."""


class EngineFacts(Protocol):
    """The facts about the engine that routers get."""

    def reached(self, host: str) -> bool:
        """Record that a connection to a router leaves from this address of ours; empty: a unix socket. True: the hello has
        changed by that."""
        ...

    def hello(self) -> InstanceHello: ...

    def beat(self) -> Heartbeat: ...

    def stats(self) -> InstanceStats: ...

    def digest(self) -> DigestFeed | None:
        """Digest of the cache for one session. None: no block is cached for others."""
        ...


class RouterSession:
    """One connection to one router."""

    __slots__ = (
        "address",
        "beats",
        "begun",
        "caller",
        "digest",
        "lapse_seconds",
        "link",
        "opened",
        "over",
        "received_at",
        "retry_seconds",
        "router",
        "stats_due",
    )

    def __init__(self, address: str, link: Link, caller: Caller, now: float) -> None:
        self.address = address
        self.link = link
        self.caller = caller
        self.router = ""
        self.begun = self.received_at = now
        self.opened: float | None = None
        "Time when the router accepted us."
        self.lapse_seconds = 0.0
        self.beats = HeartbeatTimes(now, BEAT_SECONDS)
        self.stats_due = now
        self.digest: DigestFeed | None = None
        "Digest for the router. None: the router wants none."
        self.over = ""
        "Reason for the end of the session, as text for the log. Empty: it is open."
        self.retry_seconds = 0.0
        "InstanceRefused.retry_seconds."

    def beat_for_router(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat for this router, without requests of others."""
        return replace(beat, preempted=self.caller.own_ids(beat.preempted)) if beat.preempted else beat


class RouterLinks:
    def __init__(
        self, routers: Sequence[str], credentials: Credentials, member: EngineFacts, callers: Callers, wire: WireConfig = WIRE
    ) -> None:
        self._wire = wire
        self._sources = RouterSources(routers, self._dial, self._stop_dialling, self._on_error)
        self._dialling: dict[str, asyncio.Task[None]] = {}
        "Task that holds the session, by address."
        self._credentials = credentials
        self._facts = member
        self._callers = callers
        self._sessions: dict[RouterSession, None] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._early_timer: asyncio.TimerHandle | None = None
        self._broken: asyncio.Future[None] = self._loop.create_future()
        "Error of a timer callback; it ends the engine."
        self._ticked = 0.0
        self._fault = ""
        "The fault in the last heartbeat."
        self.on_alone: Callable[[], None] = lambda: None
        "Called when the last session has ended."
        self.on_sessions: Callable[[], None] = lambda: None
        "Called when the number of open sessions has changed."
        self.counts: Counter[str] = Counter()
        "Number of sessions by SessionEvent."
        self.refusal = ""
        "Reason for which a router refused us. Empty: none did since the last session that was opened."

    @property
    def open_sessions(self) -> int:
        return sum(session.opened is not None for session in self._sessions)

    async def run(self) -> None:
        """Run until cancelled. An error is a bug and ends the engine."""
        self._sources.start()
        self._ticked = self._loop.time()
        self._arm()
        try:
            await self._broken
        finally:
            self._sources.close()
            for timer in (self._timer, self._early_timer):
                if timer is not None:
                    timer.cancel()
            for task in self._dialling.values():
                task.cancel()
            for session in self._sessions:
                session.link.close()

    def _on_error(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    # One router

    def _dial(self, address: str) -> None:
        task = self._dialling[address] = asyncio.create_task(self._hold_session(address))
        task.add_done_callback(self._kept)

    def _kept(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    def _stop_dialling(self, address: str) -> None:
        """End the session with this address, and stop dialling it: the sources of routers no longer have it."""
        logger.info("router %s: its address is gone, and is dialled no more", address)
        for session in [session for session in self._sessions if session.address == address]:
            self._end(session, "its address is gone")
        self._dialling.pop(address).cancel()

    async def _hold_session(self, address: str) -> None:
        """Dial the router and serve the session, again and again until cancelled."""
        log, redial = TroubleLog(address), RedialTimes(random.Random())
        while True:
            try:
                link = await dial(parse_address(address), self._credentials, self._wire)
            except (LinkFailed, OSError) as error:
                end = DialOutcome(str(error) or type(error).__name__)
                self.counts["unreachable"] += 1
                if isinstance(error, LinkFailed) and error.reason in ("version", "secret"):
                    self.refusal = end.why
                    self.on_sessions()
            else:
                end = await self._one_session(address, link, log, refused=redial.refused)
            log.trouble(end.why, self._loop.time())
            self._sources.dispatch(SessionLost(address))
            await asyncio.sleep(redial.after(end))

    async def _one_session(self, address: str, link: Link, log: TroubleLog, *, refused: bool) -> DialOutcome:
        """Open a session and serve it. `refused`: whether we were before."""
        if self._facts.reached(link.own_host):
            for other in list(self._sessions):  # the router has announced fewer addresses
                self._end(other, "our KV pool can be read at another address now")
        session = RouterSession(address, link, self._callers.add(link.send), self._loop.time())
        self._sessions[session] = None
        link.on_unknown_kind(lambda kind: self.counts.update(unknown_kind=1))
        try:
            hello = self._facts.hello()
            link.send(replace(hello, refused=refused, health_url=reachable_url(hello.health_url, link.own_host)))
            await link.listen(lambda message: self._on_message(session, message, log))
        except LinkFailed as failed:
            self._end(session, str(failed), "failed")
        finally:
            self._end(session, "the router ended the session")
        if session.opened is not None:
            return DialOutcome(session.over, max(self._loop.time() - session.opened, 1e-9))
        return DialOutcome(session.over, refused=session.over.startswith(REFUSED), retry_seconds=session.retry_seconds)

    def _end(self, session: RouterSession, why: str, how: SessionEvent = "ended") -> None:
        """End the session at once, however long the connection takes to close."""
        if not session.over:
            session.over = why
            self.counts[how] += 1
            del self._sessions[session]
            session.link.close()
            self._callers.remove(session.caller)
            if not self.open_sessions:
                self.on_alone()
            self.on_sessions()

    def _on_message(self, session: RouterSession, message: Message, log: TroubleLog) -> None:
        """Handle a message of a router: session messages here, requests and orders in callers.py. Messages after the end of the
        session are ignored."""
        if session.over:
            return
        session.received_at = self._loop.time()
        match message:
            case RouterHeartbeat():
                pass
            case RouterHello(router, beat_seconds, lapse_seconds, capabilities):
                session.router, session.opened = router, session.received_at
                session.digest = self._facts.digest() if CACHED_KEYS in capabilities else None
                self.counts["opened"] += 1
                self.refusal = ""
                self._sources.dispatch(SessionOpened(session.address))
                session.lapse_seconds = max(lapse_seconds, LAPSE_SECONDS_MIN)
                session.beats.seconds = max(beat_seconds, BEAT_SECONDS_MIN)
                log.recovered(f"joined router {printable(router)}")
                self.on_sessions()
                session.beats.due = session.stats_due = session.received_at
                self._send_beats([session])
                self._arm()
            case InstanceRefused(reason, retry_seconds):
                if session.opened is None:
                    self.refusal, session.retry_seconds = printable(reason), retry_seconds
                    self._end(session, f"{REFUSED}{printable(reason)}", "refused")
                else:
                    self._end(session, f"the router has given us up: {printable(reason)}")
            case _ if session.opened is None:
                self._end(session, f"a {type(message).__name__} came before the router's hello", "failed")
            case _:
                self._callers.on_message(session.caller, message)
                if type(message) in REQUESTS:
                    self._on_request_of(session)

    # All routers

    @property
    def _tick_seconds(self) -> float:
        return min([BEAT_SECONDS, *(session.beats.seconds for session in self._sessions)])

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def _tick(self) -> None:
        """End sessions that have timed out, send heartbeats that are due, and set the next timer."""
        try:
            now = self._loop.time()
            stalled, self._ticked = now - self._ticked > BEAT_SECONDS + STALL_SECONDS, now
            for session in list(self._sessions):
                if stalled:  # the cause of our stop stops routers too, and their messages may be unread
                    session.begun = session.received_at = now
                elif session.opened is None and now - session.begun > self._wire.session_hello_seconds:
                    self._end(session, f"the router sent no hello within {self._wire.session_hello_seconds:g} s", "lapsed")
                elif session.opened is not None and now - session.received_at > session.lapse_seconds:
                    self._end(session, f"nothing was received for {now - session.received_at:.1f} s", "lapsed")
            self._send_beats([session for session in self._sessions if session.beats.due <= now + EARLY_SECONDS])
            self._arm()
        except Exception as error:  # the loop would only log the error
            self._on_error(error)

    def _send_beats(self, sessions: Iterable[RouterSession]) -> None:
        """Send the heartbeat to these routers, with changes of the cache digest, and stats if they are due."""
        opened = [session for session in sessions if session.opened is not None]
        if not opened:
            return
        now, beat, stats = self._loop.time(), self._facts.beat(), None
        self._fault = beat.fault
        for session in opened:
            session.beats.on_sent(now)
            session.link.send(session.beat_for_router(beat))
            if session.digest is not None and (cached := session.digest.next()) is not None:
                session.link.send(cached)
            if session.stats_due <= now:
                session.stats_due = now + STATS_SECONDS - EARLY_SECONDS
                stats = self._facts.stats() if stats is None else stats
                session.link.send(stats)

    def _on_request_of(self, asker: RouterSession) -> None:
        """Other routers learn of the request from an early heartbeat."""
        now = self._loop.time()
        for session in self._sessions:
            if session is not asker and session.opened is not None:
                session.beats.on_request_of_another(now)
        self._arm_early()

    def _arm_early(self) -> None:
        times = [session.beats.early_due for session in self._sessions if session.beats.early_due is not None]
        if self._early_timer is None and times:
            self._early_timer = self._loop.call_at(min(times), self._send_early)

    def _send_early(self) -> None:
        """Send heartbeats that are due early, without digests and stats: these keep to the regular interval."""
        try:
            self._early_timer, now = None, self._loop.time()
            due = [each for each in self._sessions if each.beats.early_due is not None and each.beats.early_due <= now]
            if due:
                beat = self._facts.beat()
                self._fault = beat.fault
                for session in due:
                    session.beats.on_sent(now, early=True)
                    session.link.send(session.beat_for_router(beat))
            self._arm_early()
        except Exception as error:  # the loop would only log it
            self._on_error(error)

    def report_fault_change(self) -> None:
        """Send a heartbeat now if the fault has changed, instead of waiting for the next one."""
        if self._sessions and self._facts.beat().fault != self._fault:
            self._send_beats(self._sessions)

    def identity_changed(self, changed: ModelChanged, ordered_by: Caller | None = None) -> None:
        """A router that ordered other weights expects them. Every other router has offered our blocks to instances with the old
        weights: end its session, so that it gets a new hello."""
        for session in list(self._sessions):
            if session.caller is ordered_by:
                session.link.send(changed)
            else:
                self._end(session, "we compute with other weights now")


REFUSED: Final = "the router refuses us: "


class TroubleLog:
    """Limits the log lines about the same trouble with a router."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._trouble = ""
        self._again = 0.0

    def trouble(self, why: str, now: float) -> None:
        if why != self._trouble or now >= self._again:
            self._trouble, self._again = why, now + LOG_AGAIN_SECONDS
            logger.warning("router %s: %s; dialling again", self._address, why)

    def recovered(self, what: str) -> None:
        self._trouble = ""
        logger.info("router %s: %s", self._address, what)
