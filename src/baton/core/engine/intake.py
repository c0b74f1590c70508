"""Accepts or refuses requests, and ends them early: at their deadline, by an abort, by a higher attempt."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from baton.config import InstanceConfig
from baton.core.effects import Mode
from baton.core.engine.admission import new_bytes
from baton.core.engine.board import Board
from baton.core.engine.phase import OPEN
from baton.core.engine.request import Group
from baton.core.engine.service_mode import ServiceMode
from baton.core.engine.worker_watch import WorkerState, WorkerWatch
from baton.core.events import Abort
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import EndError
from baton.protocol.request import FinishReason, GenerateRequest, Refused


class Intake:
    __slots__ = ("_board", "_config", "_deadlines", "_order", "_service", "_worker")

    def __init__(self, config: InstanceConfig, board: Board, worker: WorkerWatch, service: ServiceMode) -> None:
        self._config = config
        self._board = board
        self._worker = worker
        self._service = service
        self._order = count()
        self._deadlines: list[tuple[Instant, int, RequestId]] = []

    # In

    def refusal(self, request: GenerateRequest, *, in_queue: bool = True) -> Refused | None:
        """The reason why the request is refused, cheap checks first. None: it is accepted. `in_queue` false: it does not enter
        the queue, whose bounds do not apply."""
        kv, queue, board = self._config.kv, self._config.queue, self._board
        if self._worker.state is WorkerState.GONE:
            return Refused("worker_gone", self._worker.losses, self._config.scheduler.worker_restarts_max)
        mode = self._service.mode
        if mode is not Mode.SERVING:
            return Refused("draining" if mode is Mode.DRAINING else "paused")
        known = board.groups.get(request.id)
        if known is not None and known.request.attempt >= request.attempt:
            return Refused("duplicate_id")
        kept = board.kept.get(request.id)
        if kept is not None and kept.sequence.attempt >= request.attempt:
            return Refused("duplicate_id")
        worst = -(-(len(request.prompt) + request.sampling.max_tokens - 1) // kv.block_size)
        if worst > kv.blocks:
            return Refused("never_fits", worst, kv.blocks)
        plan = new_bytes(len(request.prompt) + request.sampling.max_tokens, request.sampling)
        if plan > self._config.scheduler.plan_bytes_max:
            return Refused("never_planned", plan, self._config.scheduler.plan_bytes_max)
        if request.attempt > 1 or not in_queue:
            return None  # the first attempt was accepted, here or elsewhere: the bounds of the queue do not apply to a replay
        sequences = len(request.wanted)
        tokens = sequences * len(request.prompt)
        if sequences > queue.requests_max:
            return Refused("never_queued", sequences, queue.requests_max)
        if tokens > queue.tokens_max:
            return Refused("never_queued", tokens, queue.tokens_max)
        if board.queued + sequences > queue.requests_max:
            return Refused("queue_full", board.queued + sequences, queue.requests_max)
        if board.queued_tokens + tokens > queue.tokens_max:
            return Refused("queue_tokens_full", board.queued_tokens + tokens, queue.tokens_max)
        return None

    def group_of(self, request: GenerateRequest, now: Instant, *, in_queue: bool = True) -> Group:
        """Create the request's sequences, not yet on the board."""
        deadline = None if request.timeout_seconds is None else Instant(now + request.timeout_seconds)
        # Without prefix caching each request has its own name space. The request id does not serve: a client may use it again.
        private = b"" if self._config.kv.prefix_caching else b"%d" % next(self._order)
        group = Group(request, deadline, private)
        root = self._board.hasher.root(request.salt, private)
        priority = request.priority if self._config.scheduler.order == "priority" else 0
        for index in request.wanted:
            group.add(index, (priority, now - request.age_seconds, next(self._order)), root)
        for sequence in group.sequences:
            sequence.queued = sequence.queued and in_queue
        return group

    def begin(self, group: Group) -> None:
        """Put the request on the board. A lower attempt must have ended before (end_silently)."""
        self._board.join(group)
        for sequence in reversed(group.sequences):
            if (finish := sequence.finish) is not None:  # a replay of a complete answer: only its end was lost
                self._board.end(sequence, finish)
        if group.deadline is not None:
            heappush(self._deadlines, (group.deadline, next(self._order), group.request.id))
            if len(self._deadlines) > 2 * len(self._board.groups) + 64:  # most entries are of requests that have ended
                self._deadlines = [entry for entry in self._deadlines if not self._is_over(entry)]
                heapify(self._deadlines)

    # Out

    def end_silently(self, request: RequestId, attempt: int) -> None:
        """End every attempt up to this one without an Ended: the caller does not wait for them."""
        board = self._board
        group = board.groups.get(request)
        if group is not None and group.request.attempt <= attempt:
            for sequence in reversed(group.sequences):
                if sequence.phase in OPEN:
                    board.end(sequence, FinishReason.ABORT, silent=True)
            board.forget(request)
        kept = board.kept.get(request)
        if kept is not None and kept.sequence.attempt <= attempt:
            board.drop_kept(kept)

    def abort(self, event: Abort) -> None:
        board = self._board
        kept = board.kept.get(event.request)
        if kept is not None and kept.finished and event.index in (None, kept.sequence.index):
            board.drop_kept(kept)
        group = board.groups.get(event.request)
        if group is None:
            return
        for sequence in reversed(group.sequences):  # siblings before the leader, whose end would put them in the queue
            if sequence.phase in OPEN and event.index in (None, sequence.index):
                board.end(sequence, event.reason)

    def end_all(self, group: Group, reason: FinishReason, error: EndError | None = None, detail: str = "") -> None:
        for sequence in reversed(group.sequences):
            if sequence.phase in OPEN:
                self._board.end(sequence, reason, error, detail)

    # Time

    def next_deadline(self) -> Instant | None:
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: Instant) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._is_over(self._deadlines[0])):
            _, _, request = entry = heappop(self._deadlines)
            if not self._is_over(entry):
                self.end_all(self._board.groups[request], FinishReason.TIMEOUT)

    def _is_over(self, entry: tuple[Instant, int, RequestId]) -> bool:
        """Whether the entry is of a request that has ended (its id may be in use again, with another deadline)."""
        group = self._board.groups.get(entry[2])
        return group is None or not group.open or group.deadline != entry[0]
