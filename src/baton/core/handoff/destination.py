"""The decode end of a hand-off: a request that waits for a prompt which another instance computes.

    Expect    -> LOADING, with all its blocks; Expecting. Or refused: there is no room now
    PeerOffer -> those blocks are pulled into its own (kv/tiers.py), while the next ones are computed there
    the last  -> and the tokens that its client has by then
    all over  -> Release -> Released(kept): the copy is believed. In the queue, needing a slot; Adopted
    anything else             the copy is not believed: in the queue like a replay; what is not here is computed; Adopted

Blocks that are being written by a pull are pinned: whoever gives up, they are nobody's until the pull is over. A reservation
without a pull under way gives its blocks up when blocks are short, as any lease does: it stays LOADING without them until it
knows its client's tokens, and is computed here. Time runs out in two ways. While the prompt is computed elsewhere, nobody has
renewed the lease: it ends, and nobody is told. When all is offered: it goes on without what did not come.
"""

from __future__ import annotations

from typing import Final

from baton.config import TierConfig
from baton.core.deadlines import Deadlines
from baton.core.effects import Effect
from baton.core.engine.board import Board
from baton.core.engine.request import Group, LoadingReason, Sequence
from baton.core.kv.move import Move, MoveWaiter, Peer
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, PeerOffer, Release, Released, Reserved
from baton.protocol.ids import Instant, RequestId, StepNo
from baton.protocol.request import Refused

FAULT_CHARACTERS_MAX: Final = 300
ROOM: Final = 1
"""Tokens that the request will have when it goes on, and does not have yet: the one that the other instance samples."""


class Pull(MoveWaiter):
    """A reservation waits for these blocks of its table."""

    __slots__ = ("count", "first", "reservation")

    def __init__(self, reservation: Reservation, first: int, count: int) -> None:
        super().__init__()
        self.reservation = reservation
        self.first = first
        self.count = count


class Reservation(LoadingReason):
    __slots__ = (
        "asked",
        "begin",
        "destination",
        "fault",
        "fence",
        "last",
        "lease_seconds",
        "offered",
        "pulled",
        "pulls",
        "sequence",
        "tokens",
        "void",
    )

    def __init__(self, destination: Destination, sequence: Sequence, fence: StepNo, lease_seconds: float) -> None:
        self.destination = destination
        self.sequence = sequence
        self.fence = fence
        "The last plan that may still write to its blocks."
        self.lease_seconds = lease_seconds
        self.begin = sequence.published
        "Leading blocks that were here."
        self.offered = 0
        "Leading blocks that the other instance has computed."
        self.pulls: list[Pull] = []
        "Under way."
        self.pulled: dict[int, tuple[int, int]] = {}
        "Over: first place, blocks that came, blocks that were to come."
        self.fault = ""
        "Why a pull failed; of several the first."
        self.tokens = 0
        "That the last offer was about."
        self.last = False
        "All is offered, and the client's tokens are known."
        self.asked = False
        self.void = False
        "What was copied will not be believed."

    @property
    def gives_way(self) -> bool:
        return not self.pulls

    def ended(self) -> None:
        self.destination.ended(self)

    def whole(self) -> int:
        """Leading blocks that are here."""
        place = self.begin
        while place in self.pulled:
            came, wanted = self.pulled[place]
            place += came
            if came < wanted:
                break
        return place


class Destination:
    __slots__ = ("_board", "_config", "_outgoing", "_reservations", "deadlines")

    def __init__(self, config: TierConfig, board: Board, outgoing: list[Effect]) -> None:
        self._config = config
        self._board = board
        self._outgoing = outgoing
        self._reservations: dict[RequestId, Reservation] = {}
        self.deadlines: Deadlines[Reservation] = Deadlines()

    def __len__(self) -> int:
        return len(self._reservations)

    # Reserving

    def refusal(self, group: Group) -> Refused | None:
        """Is there room now? All that hold blocks keep room to grow, and who is in the queue before it comes first."""
        if len(self._reservations) >= self._config.reservations_max:
            return Refused("queue_full", len(self._reservations) + 1, self._config.reservations_max)
        board, sequence = self._board, group.leader
        need = board.need(sequence, ROOM)
        wanted = need.new + need.hit_idle + board.reserved(sequence.priority)
        head = board.waiting.head()
        for earlier in (*board.preempting, *([head] if head is not None else [])):
            if earlier.order < sequence.order:
                theirs = board.need(earlier)
                wanted += theirs.new + theirs.hit_idle
        available = board.cache.available
        return Refused("no_room", wanted, available) if wanted > available else None

    def reserve(self, group: Group, lease_seconds: float, fence: StepNo, now: Instant) -> None:
        """Its leader is in the queue, and leaves it with all its blocks."""
        sequence = group.leader
        self._board.lease(sequence, ROOM)
        reservation = Reservation(self, sequence, fence, lease_seconds)
        self._board.begin_loading(sequence, reservation)
        self._reservations[sequence.request.id] = reservation
        self._renew(reservation, now)
        self._expecting(reservation)

    def renew(self, request: RequestId, lease_seconds: float, now: Instant) -> None:
        """It was asked for again. If it has gone on meanwhile, Adopted is on its way."""
        reservation = self._reservations.get(request)
        if reservation is not None:
            reservation.lease_seconds = lease_seconds
            self._renew(reservation, now)
            self._expecting(reservation)

    def _renew(self, reservation: Reservation, now: Instant) -> None:
        if not reservation.last:
            self.deadlines.set(reservation, Instant(now + reservation.lease_seconds))

    def _expecting(self, reservation: Reservation) -> None:
        sequence = reservation.sequence
        cached = reservation.begin * self._board.block_size if sequence.blocks else 0
        self._outgoing.append(Reserved(sequence.request.id, sequence.attempt, cached))

    # Copying

    def offered(self, message: PeerOffer, now: Instant) -> None:
        offer = message.offer
        reservation = self._find(offer.request, offer.attempt)
        if reservation is None or reservation.last:
            return
        self._renew(reservation, now)
        self._pull(reservation, message)
        if not offer.last:
            return
        reservation.last = True
        reservation.tokens = offer.tokens
        self.deadlines.set(reservation, Instant(now + self._config.pull_seconds_max))
        sequence = reservation.sequence
        reserved = len(sequence.tokens) + ROOM
        sequence.tokens.extend(message.outputs[sequence.outputs :])
        if (finish := sequence.finish) is not None:
            self._board.end(sequence, finish)
            return
        if not offer.tokens or len(sequence.tokens) != reserved:
            self._give_up(reservation)  # nothing is kept there; or other tokens came than there is room for
        self._ask_when_copied(reservation, now)

    def _pull(self, reservation: Reservation, message: PeerOffer) -> None:
        """What was offered next to what is here already, if it can be copied at all: what cannot is computed."""
        offer, table = message.offer, reservation.sequence.blocks
        end = min(offer.place + len(offer.blocks), len(table))
        if offer.place > reservation.offered or end <= reservation.offered:
            return
        first = max(reservation.offered, reservation.begin)
        reservation.offered = end
        tiers = self._board.tiers
        if first < end and tiers.up and not reservation.void and message.peers:
            peer = Peer(message.peers[0], offer.pool, offer.blocks[first - offer.place : end - offer.place])
            pull = Pull(reservation, first, end - first)
            pull.wait_for(tiers.pull(peer, table[first:end], reservation.fence))
            reservation.pulls.append(pull)

    def pulled(self, move: Move, now: Instant) -> None:
        """A pull has ended, however far it came."""
        for pull in move.take_waiters():
            if isinstance(pull, Pull):
                reservation = pull.reservation
                reservation.pulls.remove(pull)
                reservation.pulled[pull.first] = (move.whole, pull.count)
                reservation.fault = reservation.fault or move.fault[:FAULT_CHARACTERS_MAX]
                self._ask_when_copied(reservation, now)

    def _ask_when_copied(self, reservation: Reservation, now: Instant) -> None:
        if not reservation.last or reservation.pulls:
            return
        if reservation.void or not reservation.sequence.blocks:
            self._go_on(reservation, kept=False)
        elif not reservation.asked:
            reservation.asked = True
            self.deadlines.set(reservation, Instant(now + self._config.release_seconds_max))
            self._outgoing.append(Release(reservation.sequence.request.id, reservation.sequence.attempt))

    # Going on

    def released(self, message: Released) -> None:
        reservation = self._find(message.request, message.attempt)
        if reservation is None:
            return
        if message.kept and reservation.asked:
            self._go_on(reservation, kept=True)
        elif not message.kept:
            self._give_up(reservation)
            if reservation.last:
                self._go_on(reservation, kept=False)

    def _go_on(self, reservation: Reservation, *, kept: bool) -> None:
        """It is in the queue again, with what is believed of its copy."""
        board, sequence = self._board, reservation.sequence
        self._close(reservation)
        whole = came = False
        if kept and sequence.blocks:
            self._adopt(reservation)
            whole = self._is_whole(reservation)
            came = whole or sequence.pulled_tokens > 0
        board.stats.adopted += came
        board.stats.not_adopted += not came
        if not kept or (board.tiers.host.total and not whole):
            board.drop_lease(sequence)  # what did come can be found; the rest a lower tier may have, sooner than it is computed
        board.end_loading(sequence)
        tokens = sequence.computed
        if not sequence.blocks:
            tokens = board.need(sequence).hit * board.block_size
            if board.tiers.enabled:
                board.lined_up.append(sequence)  # a lower tier may have what was not handed over
        self._outgoing.append(Adopted(sequence.request.id, sequence.attempt, tokens, reservation.fault))

    def _adopt(self, reservation: Reservation) -> None:
        """Full blocks can be found from now on, under keys of its own tokens. The last one may be partly filled: it is its own.
        Its last token is computed here, as always."""
        board, sequence, begin = self._board, reservation.sequence, reservation.begin
        size = board.block_size
        tokens = min(reservation.whole() * size, reservation.tokens, len(sequence.tokens) - 1)
        tokens = max(tokens, begin * size)
        full = tokens // size
        board.hasher.extend(sequence.keys, sequence.root, sequence.tokens, full, sequence.request.extras)
        for place in range(begin, full):
            if board.publish(sequence, place) and board.tiers.up:
                board.tiers.writes.adopted(sequence.keys[place], sequence.blocks[place])
        sequence.computed, sequence.published = tokens, full
        sequence.pulled_tokens = tokens - begin * size

    def _is_whole(self, reservation: Reservation) -> bool:
        """All full blocks are here that its tokens have."""
        tokens = min(reservation.tokens, len(reservation.sequence.tokens) - 1)
        return reservation.whole() >= tokens // self._board.block_size

    def _give_up(self, reservation: Reservation) -> None:
        """Its copy will not be believed. Its blocks go back, those that are being written when that is over."""
        reservation.void = True
        self._leave_pulls(reservation)
        self._board.drop_lease(reservation.sequence)

    def _leave_pulls(self, reservation: Reservation) -> None:
        for pull in reservation.pulls:
            pull.leave()
        reservation.pulls.clear()

    def _close(self, reservation: Reservation) -> None:
        self._leave_pulls(reservation)
        self.deadlines.discard(reservation)
        del self._reservations[reservation.sequence.request.id]

    def ended(self, reservation: Reservation) -> None:
        """Its sequence has ended meanwhile. The others of the request, if there are any, go on by themselves."""
        self._close(reservation)
        sequence = reservation.sequence
        if sequence.group.open > 1:
            self._outgoing.append(Adopted(sequence.request.id, sequence.attempt, 0))

    # Time, and lives of others

    def expire(self, now: Instant) -> list[Reservation]:
        """Those that are all offered go on. The others, which nobody has renewed, are returned: they are to end."""
        due = self.deadlines.due(now)
        for reservation in due:
            if reservation.last:
                self._give_up(reservation)
                self._go_on(reservation, kept=False)
        return [reservation for reservation in due if not reservation.last]

    def service_lost(self, now: Instant) -> None:
        """Nothing is copied any more. What has arrived is here."""
        for reservation in list(self._reservations.values()):
            self._leave_pulls(reservation)
            self._ask_when_copied(reservation, now)

    def pool_changed(self) -> None:
        """Its blocks are of a pool that is no more, or whose keys mean something else."""
        for reservation in list(self._reservations.values()):
            self._give_up(reservation)
            if reservation.last:
                self._go_on(reservation, kept=False)

    def check(self) -> None:
        """35: every reservation ends at some time, whatever the others do. 17: what it waits for is under way."""
        for reservation in self._reservations.values():
            if reservation not in self.deadlines or reservation.sequence.load is not reservation:
                raise InvariantBroken(f"{reservation.sequence!r} has room for a prompt, and no deadline", invariant=35)
            for pull in reservation.pulls:
                if pull.pending is None or not self._board.tiers.is_pending(pull.pending):
                    raise InvariantBroken(f"{reservation.sequence!r} waits for a pull that is not under way", invariant=17)

    def _find(self, request: RequestId, attempt: int) -> Reservation | None:
        reservation = self._reservations.get(request)
        return reservation if reservation is not None and reservation.sequence.attempt == attempt else None
