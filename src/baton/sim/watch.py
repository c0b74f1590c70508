"""The checks beside the core: what clients may see, what must sometimes happen, what may be left at rest.

The core audits itself (core/engine/proof.py); this looks at it from outside, with knowledge of its own: the closed-form
output of every request, who must be let in and when (reference.py), who owns which block (plans.py). The instance is asked
public questions only (core/engine/view.py). Numbers are those of docs/internals/reliability.md.
"""

from __future__ import annotations

from baton.core.effects import Mode, Refuse
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.core.events import Event, EvictSome, LossCause, PreemptSome, WorkerReady
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.ids import RequestId
from baton.protocol.output import OTHER_WEIGHTS, Emit, Ended, each_token
from baton.protocol.request import FinishReason
from baton.protocol.step import StepPlan, StepResult
from baton.sim.begun_watch import check_begun
from baton.sim.line import Line
from baton.sim.logprob_watch import LogprobWatch
from baton.sim.plans import PlanWatch
from baton.sim.reference import Reference
from baton.sim.rest import check_rest
from baton.sim.scenario import Client, Scenario
from baton.sim.simulated_request import COMPLETE, QueueKey, SimulatedRequest
from baton.sim.tags import identity_of

PREEMPTIONS_MAX = 24
"""Invariant 33: preemptions of one sequence, none of them forced, without a token in between."""


class Watch:
    def __init__(self, scenario: Scenario, instance: Instance) -> None:
        self._scenario = scenario
        self._instance = instance
        self._view = instance.view
        self.weights_known = scenario.weights_known
        self.weights = 0
        "Of the worker, as the instance was told."
        self._outdated: list[SimulatedRequest] = []
        "Those that have begun when a worker with other weights is ready."
        self.client_requests = {
            client.id: SimulatedRequest(client, weights_known=self.weights_known) for client in scenario.clients
        }
        "By id: the present user of it."
        self.all_trips = list(self.client_requests.values())
        self.reference = Reference(scenario)
        self._logprobs = LogprobWatch(self.client_requests, self.saw)
        self.sometimes: dict[str, int] = {}
        "Rare states that were reached."
        self.line = Line()
        self.plans = PlanWatch(scenario, instance.view, self.client_requests, self.reference, self.line, self.saw)
        self.model = self.plans.model
        self._absorbed: list[tuple[int, StepResult]] = []
        self._pool_spoiled = False
        "A worker that broke the protocol may have written anywhere."
        self.deliveries = 0
        self.tokens = 0
        self._preempting: dict[Sequence, int] = {}
        self._deaths: dict[str, int] = {}
        self._losses: dict[tuple[str, int], int] = {}
        self._stopped: list[SimulatedRequest] = []
        self._idle_steps = 0
        poison = sum(client.n for client in scenario.clients if client.poison_at is not None)
        faults = sum(fault.kind not in ("late", "repeat", "ghost") for fault in scenario.steps)
        loops = sum(int(nudge.amount) for nudge in scenario.nudges if nudge.kind == "crash_loop")
        self._culprits = max(1, poison + faults + loops)
        "Causes of losses that look like the fault of a request: each can keep the others from being found once more."

    def saw(self, what: str) -> None:
        self.sometimes[what] = self.sometimes.get(what, 0) + 1

    # Clients

    def submitted(self, client_request: SimulatedRequest) -> None:
        client_request.weights = self.weights
        client_request.sequences = self._view.sequences(RequestId(client_request.client.id))
        client_request.orders = [self.reference.order(client_request.client, index) for index in range(client_request.client.n)]
        self.line.joins(client_request, 0)

    def add(self, client_request: SimulatedRequest) -> None:
        """A request that is not in the scenario. One that has its id has been answered."""
        self.client_requests[client_request.client.id] = client_request
        self.all_trips.append(client_request)
        for index in range(client_request.client.n):
            self._losses.pop((client_request.client.id, index), None)

    def refused(self, effect: Refuse) -> None:
        """A refusal is the only answer."""
        client_request = self.client_requests[effect.request]
        if any(client_request.delivered) or any(client_request.ended) or client_request.refused:
            raise InvariantBroken(f"{effect.request} is refused after it was answered", invariant=22)
        if not str(effect.refused):
            raise InvariantBroken("a refusal says nothing", invariant=22)
        client_request.refused = effect.refused.reason

    def emitted(self, emit: Emit, now: float) -> None:
        """21: tokens are a prefix of the undisturbed output. 22, 23, 26: one end, with the right reason and usage."""
        self.deliveries += len(emit.tokens) + len(emit.ended)
        check_begun(emit, lambda request, index: self.client_requests[request].hit[index] or 0)
        sent = self._logprobs.sent(emit) if emit.logprobs else {}
        for request, _, index, position, token in each_token(emit.tokens):
            client_request = self.client_requests[request]
            delivered = client_request.delivered[index]
            if position != len(delivered):
                raise InvariantBroken(f"{request}.{index}: token {position} after {len(delivered)}", invariant=21)
            if client_request.ended[index] is not None or client_request.refused or not client_request.submitted:
                raise InvariantBroken(f"{request}.{index} gets a token after its end, or before it came", invariant=22)
            if client_request.oracles[index].token(len(delivered)) != token:
                raise InvariantBroken(
                    f"{request}.{index}: token {len(delivered)} is {token}, not the undisturbed one", invariant=21
                )
            if client_request.client.logprobs is not None or client_request.client.prompt_logprobs is not None:
                entries = sent.get((request, index))
                self._logprobs.expect(client_request, index, position, entries.pop(0) if entries else None)
            delivered.append(token)
            client_request.thrash[index] = 0
            if not index and position == 0:
                self.line.siblings_join(client_request)
            if token == 0:
                self.saw("token 0 was delivered")
            if len(delivered) == client_request.client.stop_string_at and index == client_request.client.n - 1:
                self._stopped.append(client_request)
        if emit.tokens:
            self.tokens += len(emit.tokens)
            self._idle_steps = 0
        self.take_in()
        for ended in emit.ended:
            self._ended(ended, now)

    def _ended(self, ended: Ended, now: float) -> None:
        client_request = self.client_requests[ended.request]
        index, client, delivered = ended.index, client_request.client, client_request.delivered[ended.index]
        if client_request.ended[index] is not None or client_request.refused or not client_request.submitted:
            raise InvariantBroken(f"{ended.request}.{index} ends twice, or before it came", invariant=22)
        client_request.ended[index] = ended.reason
        client_request.ended_at = now
        self.reference.ended(client, index)
        self.line.ended(client_request, index)
        if self.model is not None:
            self.model.ended(client_request, index)
        hit = client_request.hit[index] or 0
        if (ended.prompt_tokens, ended.output_tokens, ended.cached_tokens) != (len(client.prompt), len(delivered), hit):
            raise InvariantBroken(f"{ended.request}.{index}: usage is {ended}", invariant=23)
        below = (ended.host_tokens, ended.storage_tokens)
        if min(below) < 0 or sum(below) > (hit if self._scenario.host_blocks else 0):
            raise InvariantBroken(f"{ended.request}.{index}: {below} of {hit} tokens came from lower tiers", invariant=23)
        preempted = next((sequence.preemptions for sequence in client_request.sequences if sequence.index == index), 0)
        if ended.preemptions != preempted:
            raise InvariantBroken(f"{ended.request}.{index} was preempted {preempted} times: {ended}", invariant=23)
        match ended.reason:
            case FinishReason.STOP if self._by_stop_string(client_request, index):
                pass
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.REPETITION:
                if (
                    delivered != client_request.oracles[index].complete()
                    or ended.reason != client_request.oracles[index].reason
                ):
                    raise InvariantBroken(f"{ended.request}.{index} ends by {ended.reason} too early or wrongly", invariant=26)
                if ended.reason is FinishReason.REPETITION:
                    self.saw("an answer that repeats itself ended")
                if (len(client.prompt) + len(delivered) - 1) % self._scenario.block_size == 0:
                    self.saw("an end on a block's edge")
                if any(s.index == index and s in self._preempting for s in client_request.sequences):
                    self.saw("the last token was in flight at a preemption")
            case FinishReason.ABORT:
                if not client_request.aborted and not self.reference.may_be_drained():
                    raise InvariantBroken(f"{ended.request}.{index} is aborted by nobody", invariant=22)
            case FinishReason.TIMEOUT:
                if not self.reference.may_time_out(client):
                    raise InvariantBroken(f"{ended.request}.{index} times out before its deadline", invariant=22)
                self.saw(
                    "a deadline passed in the line" if client_request.hit[index] is None else "a deadline passed on the worker"
                )
            case FinishReason.ERROR:
                self._failed(client_request, index, ended)

    def _by_stop_string(self, client_request: SimulatedRequest, index: int) -> bool:
        """Ended by its front, at or (with tokens under way) after the place, and not by a stop id of its own."""
        wanted, oracle = client_request.client.stop_string_at, client_request.oracles[index]
        ours = wanted is not None and index == client_request.client.n - 1 and len(client_request.delivered[index]) >= wanted
        return ours and client_request.delivered[index] != oracle.tokens[: len(oracle.complete())]

    def take_stopped(self) -> list[SimulatedRequest]:
        """Sequences whose front has just seen a stop string."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _failed(self, client_request: SimulatedRequest, index: int, ended: Ended) -> None:
        """An error is allowed to those that cause one, and to all when the worker is given up."""
        outputs, client = len(client_request.delivered[index]), client_request.client
        if client.nan_at == outputs and ended.error == "row_failed":
            self.saw("one row failed, alone")
        elif client.poison_at == outputs and ended.error == "poison":
            self.saw("a poisonous request was given up")
        elif ended.detail == OTHER_WEIGHTS:
            self._expect(
                client_request in self._outdated, 59, f"{ended.request}.{index} ends, and could go on with its weights"
            )
            self.saw("an answer ended, as other weights are served")
        elif ended.error == "worker_gone" and self.reference.may_give_worker_up():
            self.saw("the worker was given up")
        elif ended.error != "poison" or self._losses.get((client.id, index), 0) < 2:
            raise InvariantBroken(f"{ended.request}.{index} fails for nothing: {ended.detail}", invariant=22)
        else:
            self.saw("a bystander was given up: the worker was lost twice at its place")

    def mode_changed(self, mode: Mode) -> None:
        """9: paused means that nobody is owed anything."""
        self.reference.mode_changed(mode.value)
        owed = [
            client_request
            for client_request in self.client_requests.values()
            if client_request.submitted and client_request.refused is None and None in client_request.ended
        ]
        if mode is Mode.PAUSED and owed:
            raise InvariantBroken(f"paused while {owed[0].client.id} is not answered", invariant=9)
        self.saw(f"mode: {mode}")

    def progressed(self, emit: Emit) -> None:
        """Whoever has a new token is past the place of an earlier loss."""
        for request, _, index, *_ in emit.tokens:
            self._losses.pop((request, index), None)

    def worker_lost(self, oldest: list[StepPlan], cause: LossCause) -> None:
        """Remember whose sequences were being computed: two such losses, with evidence, are what giving one up needs."""
        evidence = self.reference.is_evidence(cause)
        self.reference.worker_lost(evidence=evidence, perhaps_absorbed=len(oldest))
        self.line.worker_lost()
        if self.model is not None:
            self.model.worker_lost()
        self._pool_spoiled |= cause == "protocol"
        if not evidence:
            return
        suspects = {
            (client_request.client.id, index): None for plan in oldest for client_request, index in self.plans.places_of(plan)
        }
        for suspect in suspects:
            self._losses[suspect] = self._losses.get(suspect, 0) + 1

    def client_of(self, slot: int, incarnation: int) -> Client:
        return self.plans.client_of(slot, incarnation)

    def worker_dies(self) -> None:
        """The process is dead; the instance does not know yet."""
        if self._view.preempting():
            self.saw("the worker was lost with a preemption unacknowledged")
        if self._instance.worker.losses:
            self.saw("the worker was lost twice in a row")

    def poisoned(self, client: Client | None) -> None:
        """47: one client's request takes at most log2(suspects) + 2 workers for each of its sequences with it, and before that
        those that seem to be killed from outside, while such kills do not count."""
        if client is not None:
            self._deaths[client.id] = self._deaths.get(client.id, 0) + 1
            unseen = self._scenario.worker_kills_max if self._scenario.poison_unseen else 0
            allowed = ((self._scenario.slots - 1).bit_length() + 2) * client.n * self._culprits
            if self._deaths[client.id] > unseen + allowed:
                raise InvariantBroken(f"{client.id} has killed {self._deaths[client.id]} workers", invariant=47)

    # After every event

    def after(self) -> None:
        """22, 33, 35, 59, for what this event touched."""
        instance, view = self._instance, self._view
        for client_request in self._outdated:
            self._expect(client_request.is_answered, 59, f"{client_request.name} has begun, and is to go on with other weights")
        self._outdated.clear()
        self.reference.after_event(worker_gone=instance.worker.state.value == "gone")
        if view.oldest_step is None and view.has_work:
            waits = instance.worker.state.value != "ready" or instance.mode.value == "paused" or view.load().loading
            self._expect(bool(waits), 35, "work and no step")
        preempting = view.preempting()
        if preempting or self._preempting:
            self._preemptions(preempting)
        if self.model is not None:
            self.model.after_event()

    def begin_event(self, event: Event, absorbed: list[tuple[int, StepResult]], planned: bool) -> None:
        """What the models must know before clients are told anything."""
        self._absorbed = absorbed
        changed = isinstance(event, WorkerReady) and self._reloaded(event.fingerprint)
        model = self.model
        if model is None:
            return
        model.event()
        if type(event) is PreemptSome:
            for sequence in self._view.preempting():
                model.preempted_from_outside(self.client_requests[sequence.request.id], sequence.index)
        elif type(event) is EvictSome:
            model.cache.sync(in_order=not planned)
        elif type(event) is WorkerReady and self._instance.worker.state.value == "ready":
            if self._pool_spoiled or changed or not self._scenario.pool_kept:
                model.cache.sync(everything=True)
            elif not planned:
                model.cache.sync(kept=True)
            self._pool_spoiled = False

    def _reloaded(self, identity: bytes) -> bool:
        """A worker is ready. With other weights whoever has nothing yet begins with those, and the others must end."""
        if identity == identity_of(self.weights):
            return False
        self.saw("a worker came back with other weights")
        self.weights = next(weights for weights in self.weights_known if identity_of(weights) == identity)
        for client_request in self.all_trips:
            if client_request.submitted and not client_request.is_answered:
                if any(client_request.delivered) or any(client_request.ended):
                    self._outdated.append(client_request)
                else:
                    client_request.weights = self.weights
        return True

    def take_in(self) -> None:
        """Steps that were absorbed in this event: clients have their tokens, and nobody has ended yet."""
        absorbed, self._absorbed = self._absorbed, []
        for step, result in absorbed:
            self.line.absorbed(step)
            if self.model is not None:
                self.model.absorbed(step, result)

    def step_absorbed(self) -> None:
        self._idle_steps += 1
        if self._idle_steps > 200 + 4 * self._scenario.blocks * self._scenario.block_size:
            raise InvariantBroken(f"{self._idle_steps} steps without a token for anyone", invariant=35)

    def forced(self) -> None:
        """A preemption from outside, or a lost worker, does not count as thrashing."""
        self._idle_steps = 0
        for client_request in self.all_trips:
            if not client_request.is_answered:
                client_request.thrash = [0] * client_request.client.n

    def _preemptions(self, preempting: list[Sequence]) -> None:
        running = self._view.running()
        for sequence in preempting:
            if self._preempting.get(sequence) == sequence.preemptions:
                continue
            self._preempting[sequence] = sequence.preemptions
            if sequence.in_flight:
                self.saw("preempted with tokens in flight")
            if sequence.computed or sequence.blocks or sequence.slot < 0:
                raise InvariantBroken(f"{sequence!r} is preempted and holds blocks, or lost its slot", invariant=31)
            if any(self._order(other) > self._order(sequence) for other in running):
                raise InvariantBroken(f"{sequence!r} is preempted and not the last in line", invariant=33)
            thrash = self.client_requests[sequence.request.id].thrash
            thrash[sequence.index] += 1
            if thrash[sequence.index] > PREEMPTIONS_MAX:
                raise InvariantBroken(f"{sequence!r}: preempted again and again, no token in between", invariant=33)
            if len(preempting) > 1 and not running:
                self.saw("everything was preempted")
            if sequence.preemptions > 1:
                self.saw("preempted more than once")
        for sequence in [s for s in self._preempting if s.phase is not Phase.PREEMPTING]:
            del self._preempting[sequence]

    def _order(self, sequence: Sequence) -> QueueKey:
        return self.client_requests[sequence.request.id].orders[sequence.index]

    # At rest

    def at_rest(self) -> None:
        """9, 22: nothing is held and everyone was answered; without faults, everything that fits succeeded."""
        instance, load = self._instance, self._view.load()
        if instance.stats.folded_blocks:
            self.saw("two sequences filled the same block: folded")
        if self._view.evicted:
            self.saw("a cached block was evicted")
        if instance.stats.stale_rows:
            self.saw("a late row of a former occupant")
        if any(load[2:]):
            raise InvariantBroken(f"at rest: {load}", invariant=9)
        if instance.next_deadline() is not None:
            raise InvariantBroken("at rest and a deadline is armed", invariant=9)
        check_rest(instance)
        quiet = not self._scenario.faults
        for client_request in self.all_trips:
            if client_request.submitted and client_request.refused is None and None in client_request.ended:
                raise InvariantBroken(f"{client_request.client.id} was never answered", invariant=22)
            if quiet and client_request.client.timeout is None and client_request.refused is None:
                self._expect(
                    all(r in COMPLETE for r in client_request.ended), 22, f"{client_request.client.id} did not succeed"
                )

    def _expect(self, ok: bool, invariant: int, message: str) -> None:
        if not ok:
            raise InvariantBroken(message, invariant=invariant)
