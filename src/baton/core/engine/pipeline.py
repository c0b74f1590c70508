"""Plans in flight to the worker, and their results.

    plans     5 6 7 ->  worker  -> results   4, 6 (overtook 5: kept until 5 arrives), 4 again (stale)

Plans are sent while fewer than `steps_in_flight` results are missing, so the worker always has its next step. Results are
absorbed once and in order, whatever order they arrive in.
"""

from __future__ import annotations

from collections import deque

from baton.config import SchedulerConfig
from baton.core.engine.absorb import absorb
from baton.core.engine.board import Board
from baton.core.engine.pace import StepPace
from baton.core.engine.scheduler import PlanInFlight, Scheduler
from baton.core.engine.worker_watch import WorkerWatch
from baton.errors import ProtocolError
from baton.protocol.ids import Instant, StepNo
from baton.protocol.step import StepPlan, StepResult, read_rows


class StepPipeline:
    __slots__ = ("_absorbed_at", "_board", "_early", "_next_step", "_pace", "_scheduler", "_steps_max", "_worker", "in_flight")

    def __init__(
        self, config: SchedulerConfig, board: Board, scheduler: Scheduler, pace: StepPace, worker: WorkerWatch
    ) -> None:
        self._steps_max = config.steps_in_flight
        self._board = board
        self._scheduler = scheduler
        self._pace = pace
        self._worker = worker
        self.in_flight: deque[PlanInFlight] = deque()
        "Plans without a result, oldest first."
        self._early: dict[StepNo, StepResult] = {}
        "Results that overtook an older one; never more than steps_in_flight."
        self._next_step = StepNo(1)
        self._absorbed_at = Instant(0.0)

    @property
    def last_step(self) -> StepNo:
        """Number of the last plan that was sent."""
        return StepNo(self._next_step - 1)

    def plan(self, now: Instant) -> StepPlan | None:
        """The next plan for a ready worker. None: the worker has enough plans, or no work is due."""
        if len(self.in_flight) >= self._steps_max:
            return None
        issued = self._scheduler.plan_step(self._next_step, self._worker.epoch, now)
        if issued is None:
            return None
        self._next_step = StepNo(self._next_step + 1)
        self._board.stats.steps += 1
        self._worker.step_planned(now)
        self.in_flight.append(issued)
        return issued.plan

    def take(self, result: StepResult, now: Instant) -> None:
        """Absorb the next result in order; keep a result that overtook it; ignore results of another worker and repeated ones.

        Raises ProtocolError if the worker broke the protocol: its state is not the expected one.
        """
        if result.epoch != self._worker.epoch or not self.in_flight or not self._is_awaited(result.step):
            self._board.stats.stale_results += 1
            return
        self._early[result.step] = result
        while self.in_flight and (due := self._early.pop(self.in_flight[0].plan.step, None)) is not None:
            self._absorb(self.in_flight[0], due)
            done = self.in_flight.popleft()
            began = max(done.planned_at, self._absorbed_at)
            self._pace.step_done(done.prompt_tokens, done.decoding, now - began, drafted=bool(due.drafted))
            self._absorbed_at = now
            self._worker.step_absorbed(now, bool(self.in_flight))

    def clear(self) -> None:
        """Drop the plans in flight: the worker is lost."""
        self.in_flight.clear()
        self._early.clear()

    def _is_awaited(self, step: StepNo) -> bool:
        return self.in_flight[0].plan.step <= step <= self.in_flight[-1].plan.step and step not in self._early

    def _absorb(self, issued: PlanInFlight, result: StepResult) -> None:
        """Check the result against its plan and change the board. Raises ProtocolError before any change."""
        plan, board, planned = issued.plan, self._board, issued.plan.rows
        rows = read_rows(plan, issued.unfinished, result)
        if not board.slots.rows_match(planned, result):
            raise ProtocolError(f"step {plan.step}: a row is doubled, or of another occupant")
        run, chunks = plan.run, {}
        if run.counts.count(1) != len(run.counts):
            chunks = {slot: tokens for slot, tokens in zip(run.slots, run.counts, strict=True) if tokens != 1}
        board.stats.stale_rows += len(result.slots) - len(planned)
        absorb(board, chunks, rows, result)
