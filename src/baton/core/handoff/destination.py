"""The decode end of a hand-off: a request that waits for a prompt which another instance computes.

    Reserve   -> LOADING, with all its blocks; Reserved. Less urgent sequences make room for it (engine/preemption.py). Without
                 room it waits (reservation_queue.py), or is refused
    PeerOffer -> those blocks are pulled into its own (kv/tiers.py), while the next ones are computed there
    the last  -> also carries the tokens that the client has by then
    all ended -> Release -> Released(kept): the copy is valid. In the queue, needing a slot; Adopted
    anything else             the copy is void: in the queue like a replay; missing blocks are computed; Adopted

Blocks that a pull is writing are pinned: after the reservation is given up they stay pinned until the pull ends. A reservation
without a pull under way gives up its blocks when blocks are short, as any lease does: it stays LOADING without them until it
knows its client's tokens, and is computed here. There are three timeouts. A reservation that waits for room is refused. While
the prompt is computed elsewhere, a lease that is not renewed ends the request silently. After the last offer, the request
continues without the blocks that did not arrive.
"""

from __future__ import annotations

from typing import Final

from baton.config import TierConfig
from baton.core.deadlines import Deadlines
from baton.core.effects import Effect
from baton.core.engine.board import Board
from baton.core.engine.preemption import BlockClaim, make_room, victims_for
from baton.core.engine.request import Group, LoadingReason, Sequence
from baton.core.handoff.reservation_queue import ReservationQueue
from baton.core.kv.move import Move, MoveWaiter, Peer
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, PeerOffer, Release, Released, Reserved
from baton.protocol.ids import Instant, RequestId, StepNo
from baton.protocol.request import Refused

FAULT_CHARACTERS_MAX: Final = 300
ROOM: Final = 1
"""Number of tokens that the other instance samples before the request continues here."""


class Pull(MoveWaiter):
    """A pull in progress, and the range of the table that it fills."""

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
        "waits_since",
    )

    def __init__(self, destination: Destination, sequence: Sequence, lease_seconds: float, now: Instant) -> None:
        self.destination = destination
        self.sequence = sequence
        self.waits_since: Instant | None = now
        "The wait for blocks. None: the reservation has its blocks."
        self.fence = StepNo(0)
        "The last plan that may still write to its blocks."
        self.lease_seconds = lease_seconds
        self.begin = 0
        "Leading blocks that were cached here."
        self.offered = 0
        "Leading blocks that the other instance has computed."
        self.pulls: list[Pull] = []
        "Pulls in progress."
        self.pulled: dict[int, tuple[int, int]] = {}
        "Ended pulls: first place in the table, blocks that arrived, blocks that were requested."
        self.fault = ""
        "Reason why a pull failed; of several the first."
        self.tokens = 0
        "Number of tokens that the last offer covers."
        self.last = False
        "Whether all blocks are offered, and the client's tokens are known."
        self.asked = False
        self.void = False
        "Whether the copied blocks must not be used."

    @property
    def gives_way(self) -> bool:
        return not self.pulls

    def ended(self) -> None:
        self.destination.ended(self)

    def whole(self) -> int:
        """Number of leading blocks that have arrived."""
        place = self.begin
        while place in self.pulled:
            came, wanted = self.pulled[place]
            place += came
            if came < wanted:
                break
        return place


class Destination:
    __slots__ = ("_board", "_config", "_outgoing", "_queue", "_reservations", "deadlines")

    def __init__(self, config: TierConfig, board: Board, outgoing: list[Effect]) -> None:
        self._config = config
        self._board = board
        self._outgoing = outgoing
        self._reservations: dict[RequestId, Reservation] = {}
        self._queue = ReservationQueue(board.awaiting, config.reservations_waiting_max)
        self.deadlines: Deadlines[Reservation] = Deadlines()

    def __len__(self) -> int:
        return len(self._reservations)

    # Reserving

    def refusal(self, group: Group, wait_seconds: float) -> Refused | None:
        """Refuse if there are too many reservations, or if there is no room now, less urgent sequences do not make it, and the
        request may not wait."""
        if len(self._reservations) >= self._config.reservations_max:
            return Refused("queue_full", len(self._reservations) + 1, self._config.reservations_max)
        if wait_seconds or (short := self.shortage(group.leader)) is None:
            return None
        return short if victims_for(self._board, self._claim(group.leader)) is None else None

    def shortage(self, sequence: Sequence) -> Refused | None:
        """None: there is room."""
        claim = self._claim(sequence)
        return Refused("no_room", claim.wanted, self._board.cache.available) if claim.is_short(self._board) else None

    def _claim(self, sequence: Sequence) -> BlockClaim:
        """Holders of blocks keep room to grow, and earlier requests that wait for blocks come first."""
        board = self._board
        needs = [(sequence, board.need(sequence, ROOM))]
        for earlier in (*board.preempting, board.waiting.head(), self._queue.head()):
            if earlier is not None and earlier.order < sequence.order:
                needs.append((earlier, board.need(earlier)))
        wanted = board.reserved(sequence.priority) + sum(need.new + need.hit_idle for _, need in needs)
        hits = [block for each, need in needs for block in board.cache.blocks_of(each.keys[: need.hit])]
        return BlockClaim(sequence, wanted, hits)

    def begin(self, group: Group, lease_seconds: float, wait_seconds: float, now: Instant) -> None:
        """Begin a reservation: the leader leaves the queue. `grant` gives it its blocks."""
        sequence = group.leader
        reservation = Reservation(self, sequence, lease_seconds, now)
        self._board.begin_loading(sequence, reservation)
        self._reservations[sequence.request.id] = reservation
        self.deadlines.set(reservation, Instant(now + wait_seconds))
        self._queue.join(sequence)

    def grant(self, fence: StepNo, now: Instant) -> None:
        """Reserve the blocks of the reservations that wait, in order, as long as there is room or less urgent sequences make
        it."""
        while (sequence := self._queue.head()) is not None and self._has_room(sequence):
            self._queue.leave(sequence)
            self._board.lease(sequence, ROOM)
            reservation = self._reservations[sequence.request.id]
            waited = 0.0 if reservation.waits_since is None else now - reservation.waits_since
            reservation.waits_since, reservation.fence, reservation.begin = None, fence, sequence.published
            self._renew(reservation, now)
            self._send_reserved(reservation, waited)

    def _has_room(self, sequence: Sequence) -> bool:
        return self.shortage(sequence) is None or make_room(self._board, sequence, self._claim)

    def surplus(self) -> Reservation | None:
        """The least urgent reservation, if too many wait for room: the caller refuses it."""
        last = self._queue.surplus()
        return None if last is None else self._reservations[last.request.id]

    def renew(self, request: RequestId, lease_seconds: float, now: Instant) -> None:
        """Renew the lease. If the request has continued meanwhile, Adopted was sent."""
        reservation = self._reservations.get(request)
        if reservation is not None and reservation.waits_since is None:
            reservation.lease_seconds = lease_seconds
            self._renew(reservation, now)
            self._send_reserved(reservation)

    def _renew(self, reservation: Reservation, now: Instant) -> None:
        if not reservation.last:
            self.deadlines.set(reservation, Instant(now + reservation.lease_seconds))

    def _send_reserved(self, reservation: Reservation, waited_seconds: float = 0.0) -> None:
        sequence = reservation.sequence
        cached = reservation.begin * self._board.block_size if sequence.blocks else 0
        self._outgoing.append(Reserved(sequence.request.id, sequence.attempt, cached, waited_seconds))

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
            self._give_up(reservation)  # the source keeps no blocks, or sent more tokens than there is room for
        self._ask_when_copied(reservation, now)

    def _pull(self, reservation: Reservation, message: PeerOffer) -> None:
        """Pull the offered blocks that follow the present ones. Blocks that cannot be copied are computed."""
        offer, table = message.offer, reservation.sequence.blocks
        end = min(offer.place + len(offer.blocks), len(table))
        if offer.place > reservation.offered or end <= reservation.offered:
            return
        first = max(reservation.offered, reservation.begin)
        reservation.offered = end
        tiers = self._board.tiers
        if first < end and tiers.up and not reservation.void and message.peers:
            peer = Peer("\n".join(message.peers), offer.pool, offer.blocks[first - offer.place : end - offer.place])
            pull = Pull(reservation, first, end - first)
            pull.wait_for(tiers.pull(peer, table[first:end], reservation.fence))
            reservation.pulls.append(pull)

    def pulled(self, move: Move, now: Instant) -> None:
        """Record the end of a pull, complete or not."""
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
            self._continue_request(reservation, kept=False)
        elif not reservation.asked:
            reservation.asked = True
            self.deadlines.set(reservation, Instant(now + self._config.release_seconds_max))
            self._outgoing.append(Release(reservation.sequence.request.id, reservation.sequence.attempt))

    # Continuing

    def released(self, message: Released) -> None:
        reservation = self._find(message.request, message.attempt)
        if reservation is None:
            return
        if message.kept and reservation.asked:
            self._continue_request(reservation, kept=True)
        elif not message.kept:
            self._give_up(reservation)
            if reservation.last:
                self._continue_request(reservation, kept=False)

    def _continue_request(self, reservation: Reservation, *, kept: bool) -> None:
        """Return the sequence to the queue, with the blocks of a valid copy."""
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
            board.drop_lease(sequence)  # arrived blocks are cached; a lower tier may have the rest sooner
        board.end_loading(sequence)
        tokens = sequence.computed
        if not sequence.blocks:
            tokens = board.need(sequence).hit * board.block_size
            if board.tiers.enabled:
                board.newly_queued.append(sequence)  # a lower tier may have blocks that were not handed over
        self._outgoing.append(Adopted(sequence.request.id, sequence.attempt, tokens, reservation.fault))

    def _adopt(self, reservation: Reservation) -> None:
        """Publish full blocks under keys of the sequence's own tokens. The last block may be partly filled and stays private.
        The last token is always computed here."""
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
        """Whether all full blocks of the sequence's tokens have arrived."""
        tokens = min(reservation.tokens, len(reservation.sequence.tokens) - 1)
        return reservation.whole() >= tokens // self._board.block_size

    def _give_up(self, reservation: Reservation) -> None:
        """Discard the copy. Its blocks are released; those that a pull is writing, when the pull ends."""
        reservation.void = True
        self._leave_pulls(reservation)
        self._board.drop_lease(reservation.sequence)

    def _leave_pulls(self, reservation: Reservation) -> None:
        for pull in reservation.pulls:
            pull.leave()
        reservation.pulls.clear()

    def _close(self, reservation: Reservation) -> None:
        """Forget the reservation and its pulls. The sequence keeps its blocks."""
        self._leave_pulls(reservation)
        self.deadlines.discard(reservation)
        self._queue.leave(reservation.sequence)
        del self._reservations[reservation.sequence.request.id]

    def ended(self, reservation: Reservation) -> None:
        """End the reservation of an ended sequence. Other sequences of the request continue without the copy."""
        self._close(reservation)
        sequence = reservation.sequence
        if sequence.group.open > 1:
            self._outgoing.append(Adopted(sequence.request.id, sequence.attempt, 0))

    # Timeouts and losses

    def expire(self, now: Instant) -> list[Reservation]:
        """Continue the requests whose prompt is completely offered. Return the others, whose lease was not renewed or whose
        wait for room has timed out: the caller ends them."""
        due = self.deadlines.due(now)
        for reservation in due:
            if reservation.last:
                self._give_up(reservation)
                self._continue_request(reservation, kept=False)
        return [reservation for reservation in due if not reservation.last]

    def service_lost(self, now: Instant) -> None:
        """End all pulls: the cache service is lost. Arrived blocks stay."""
        for reservation in list(self._reservations.values()):
            self._leave_pulls(reservation)
            self._ask_when_copied(reservation, now)

    def pool_changed(self) -> None:
        """Discard all copies: the pool was replaced, or its keys have changed."""
        for reservation in [each for each in self._reservations.values() if each.waits_since is None]:
            self._give_up(reservation)
            if reservation.last:
                self._continue_request(reservation, kept=False)

    def check(self) -> None:
        """35: every reservation has a deadline. 17: every pull that it waits for is under way."""
        self._queue.check()
        if sum(each.waits_since is not None for each in self._reservations.values()) != len(self._queue):
            raise InvariantBroken(f"{len(self._queue)} reservations wait in the queue, not all that wait", invariant=25)
        for reservation in self._reservations.values():
            if reservation not in self.deadlines or reservation.sequence.load is not reservation:
                raise InvariantBroken(f"{reservation.sequence!r} has room for a prompt, and no deadline", invariant=35)
            for pull in reservation.pulls:
                if pull.pending is None or not self._board.tiers.is_pending(pull.pending):
                    raise InvariantBroken(f"{reservation.sequence!r} waits for a pull that is not under way", invariant=17)

    def _find(self, request: RequestId, attempt: int) -> Reservation | None:
        """The reservation of this attempt. None also for one that waits for room: nothing can be copied for it."""
        reservation = self._reservations.get(request)
        if reservation is None or reservation.sequence.attempt != attempt or reservation.waits_since is not None:
            return None
        return reservation
