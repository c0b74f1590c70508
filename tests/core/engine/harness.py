"""An instance on a bench: `Driver` feeds it events, `FakeWorker` executes its plans with a few lines of arithmetic.

The worker keeps a number, a *mark*, for every position, in memory that it reaches only through the block table it was given.
A mark depends on the token and on all marks before it; the next token depends on the last mark. So `undisturbed` knows the
right output in closed form, and a stale, foreign, torn or misordered block changes it.

    driver = Driver(blocks=8, block_size=4)
    driver.submit("a", prompt=range(6), max_tokens=5)
    driver.step()                  # the worker executes the oldest plan, the instance absorbs the oldest result
    driver.execute()               # ... only the first half: the result is held back in `driver.results`
    driver.deliver()               # ... the second half; deliver(1) takes a younger result first
    driver.run()                   # until nothing is left to do

After every event: `Instance.check()`, no budget is exceeded, what clients have is a prefix of what they are owed, nobody
hears anything after an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from baton.config import InstanceConfig, KVConfig, QueueConfig, SchedulerConfig, TierConfig
from baton.core.effects import Mode, ModeChanged, Refuse, RestartCache, RestartWorker, RunStep, SendToCache, StopWorker
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence as Scheduled
from baton.core.events import Abort, Event, LossCause, PreemptSome, StepDone, Submit, Tick, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.protocol.control import OrderAnswer
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.protocol.ids import Instant, PoolIncarnation, RequestId
from baton.protocol.output import Begun, Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, Refused, SamplingParams
from baton.protocol.step import PREEMPTED_TOKEN_ID, NewSequence, RowLogprobs, StepPlan, StepResult, TokenLogprob
from baton.sim.rest import check_rest

VOCAB = 101
MARKS = 10_007


def fold(marks: Iterable[int], value: int = 17) -> int:
    """All earlier positions in one number. It is carried on from position to position, so that a prompt costs no square."""
    for one in marks:
        value = (value * 31 + one) % MARKS
    return value


def mark(earlier: int, token: int) -> int:
    """What stands for one position's KV; `earlier` is the fold of the positions before it."""
    return (earlier * 31 + token + 1) % MARKS


def draw(last_mark: int, sampling: SamplingParams, index: int, position: int) -> int:
    """The next token; `position` counts outputs. With top_k there are so few words that answers repeat themselves."""
    return (last_mark + sampling.seed + 13 * index + 5 * position) % (VOCAB if sampling.top_k < 0 else sampling.top_k)


def undisturbed(request: GenerateRequest, index: int = 0) -> list[int]:
    """What any correct instance answers: no batch, no blocks, no cache."""
    sampling, earlier, last, outputs = request.sampling, fold(()), 0, []
    for token in request.prompt:
        last = mark(earlier, token)
        earlier = fold((last,), earlier)
    while len(outputs) < sampling.max_tokens:
        token = draw(last, sampling, index, len(outputs))
        outputs.append(token)
        last = mark(earlier, token)
        earlier = fold((last,), earlier)
        if stops(request, outputs) or repeats(request, outputs):
            break
    return outputs


@dataclass
class Occupant:
    incarnation: int
    tokens: list[int]
    prompt_tokens: int
    computed: int
    table: list[int]
    sampling: SamplingParams
    index: int


class FakeWorker:
    """Executes plans in order, exactly as protocol/step.py says, and asserts what a real worker would have to rely on."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.states: dict[int, Occupant] = {}
        self.last_incarnation: dict[int, int] = {}
        self.memory: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        rows: list[tuple[int, int, tuple[int, ...]]] = []
        logprobs: list[RowLogprobs] = []
        for slot, incarnation in plan.drops:
            assert self.states.pop(slot).incarnation == incarnation, "the drop names somebody who is not there"
        for new in plan.new:
            assert new.slot not in self.states, "the slot is taken"
            assert new.incarnation > self.last_incarnation.get(new.slot, 0), "the incarnation did not grow"
            assert new.computed_tokens < len(new.tokens) <= len(new.blocks) * self.block_size
            self.last_incarnation[new.slot] = new.incarnation
            self.states[new.slot] = Occupant(
                new.incarnation,
                list(new.tokens),
                new.prompt_tokens,
                new.computed_tokens,
                list(new.blocks),
                plan.sampling[new.sampling],
                new.index,
            )
        for slot, block in plan.grown:
            self.states[slot].table.append(block)
        for slot, place, block in plan.deduplicated:
            table = self.states[slot].table
            assert self._content(table[place]) == self._content(block), "folded onto a block with other content"
            table[place] = block
        for slot, count in zip(plan.run.slots, plan.run.counts, strict=True):
            begin, values = self.states[slot].computed, self._compute(slot, count)
            rows.append((slot, self.states[slot].incarnation, values))
            logprobs += self._thoughts(slot, begin, values)
        rows += [
            (slot, incarnation, (PREEMPTED_TOKEN_ID,)) for slot, incarnation in plan.drops
        ]  # last, as `rows` of a plan says
        return StepResult.of(plan.step, plan.epoch, rows, logprobs=tuple(logprobs))

    def _compute(self, slot: int, count: int) -> tuple[int, ...]:
        assign_slot = self.states[slot]
        assert 0 < count <= len(assign_slot.tokens) - assign_slot.computed, "more to run than is known"
        assert len({*assign_slot.table}) == len(assign_slot.table), "a block twice in one table"
        others = {block for name, other in self.states.items() if name != slot for block in other.table}
        earlier = fold(self.memory[self._place(assign_slot, position)] for position in range(assign_slot.computed))
        for position in range(assign_slot.computed, assign_slot.computed + count):
            block, offset = self._place(assign_slot, position)
            assert block not in others, "a shared block is written"
            self.memory[block, offset] = mark(earlier, assign_slot.tokens[position])
            earlier = fold((self.memory[block, offset],), earlier)
        assign_slot.computed += count
        if assign_slot.computed < len(assign_slot.tokens):
            return ()
        last = self.memory[self._place(assign_slot, assign_slot.computed - 1)]
        token = draw(last, assign_slot.sampling, assign_slot.index, len(assign_slot.tokens) - assign_slot.prompt_tokens)
        assign_slot.tokens.append(token)
        return (token,)

    def _thoughts(self, slot: int, begin: int, values: tuple[int, ...]) -> list[RowLogprobs]:
        """What the sequence asked to be told: of the token it sampled, of the part of the prompt that it computed."""
        assign_slot, sampled, prompt = self.states[slot], None, ()
        if assign_slot.sampling.logprobs is not None and values:
            sampled = TokenLogprob(values[0], -0.5, 1)
        if assign_slot.sampling.prompt_logprobs is not None:
            computed = assign_slot.tokens[begin : min(assign_slot.computed, assign_slot.prompt_tokens)]
            prompt = tuple(TokenLogprob(token, -0.5, 1) for token in computed)
        return [RowLogprobs(slot, assign_slot.incarnation, sampled, begin, prompt)] if sampled or prompt else []

    def _place(self, assign_slot: Occupant, position: int) -> tuple[int, int]:
        return assign_slot.table[position // self.block_size], position % self.block_size

    def _content(self, block: int) -> list[int]:
        return [self.memory[block, offset] for offset in range(self.block_size)]


def make_config(**settings: Any) -> InstanceConfig:
    """Flat settings to the classes that own them. Small, and without a growth reserve, so that tests can count blocks."""
    small: dict[str, Any] = {"blocks": 64, "block_size": 4, "slots": 4, "tokens_per_step": 64}
    settings = small | {"reserve_start": 0.0, "reserve_learning": 0.0} | settings

    def take(owner: type) -> Any:
        return owner(**{f.name: settings.pop(f.name) for f in fields(owner) if f.name in settings})

    config = InstanceConfig(kv=take(KVConfig), scheduler=take(SchedulerConfig), queue=take(QueueConfig), tiers=take(TierConfig))
    assert not settings, f"no such settings: {', '.join(settings)}"
    return config


class Driver:
    def __init__(self, *, start: bool = True, steps_ahead: int = 1, **settings: Any) -> None:
        self.config = make_config(**settings)
        self.instance = Instance(self.config)
        self.worker = FakeWorker(self.config.kv.block_size)
        self.pool_incarnation = PoolIncarnation(1)
        self.now = 0.0
        self.plans: deque[StepPlan] = deque()
        "Handed to the worker, not executed."
        self.results: list[StepResult] = []
        "Executed, not delivered, oldest first."
        self.history: list[StepPlan] = []
        "Every plan ever made."
        self.requests: dict[str, GenerateRequest] = {}
        self.sequences: dict[str, list[Scheduled]] = {}
        self.owed: dict[tuple[str, int], list[int]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[RowLogprobs]] = {}
        self.begun: dict[tuple[str, int], Begun] = {}
        self.ended: dict[tuple[str, int], Ended] = {}
        self.refused: dict[str, Refused] = {}
        self.restarts: list[RestartWorker] = []
        self.modes: list[Mode] = []
        self.orders: dict[int, str] = {}
        self.stopped: list[int] = []
        self.steps_ahead = steps_ahead
        if start:
            self.dispatch(WorkerReady(self.instance.worker.epoch, self.pool_incarnation, steps_ahead=steps_ahead))

    # Events in

    def dispatch(self, event: Event) -> list[Any]:
        effects = self.instance.handle(event, Instant(self.now))
        self.take_in(effects)
        return effects

    def take_in(self, effects: list[Any]) -> None:
        for effect in effects:
            self._collect(effect)
        epoch = self.instance.worker.epoch
        self.plans = deque(plan for plan in self.plans if plan.epoch == epoch)  # a dead worker executes nothing
        self.instance.check()
        deadline = self.instance.next_deadline()
        of_others = (self.instance.worker.deadline, self.instance.board.tiers.next_deadline())  # only a Tick looks at these
        if deadline not in of_others:
            assert deadline is None or deadline > self.now, "a deadline that is over is still armed"

    def submit(self, name: str, prompt: Iterable[int] = (1, 2, 3), **given: Any) -> GenerateRequest:
        request = make_request(name, prompt, **given)
        effects = self.instance.handle(Submit(request), Instant(self.now))
        if not any(isinstance(effect, Refuse) for effect in effects):
            for index in request.wanted:  # the name may have been used before
                for record in (self.owed, self.logprobs, self.ended):
                    record.pop((name, index), None)
                self.tokens[name, index] = list(request.delivered(index))
            self.requests[name] = request
            group = self.instance.board.groups.get(request.id)
            self.sequences[name] = list(group.sequences) if group is not None else []
        self.take_in(effects)
        return request

    def abort(self, name: str, index: int | None = None) -> list[Any]:
        return self.dispatch(Abort(RequestId(name), index))

    def preempt(self, count: int = 1) -> None:
        self.dispatch(PreemptSome(count))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.dispatch(Tick())

    # The worker's side

    def execute(self) -> StepResult:
        """The worker executes the oldest plan; its result waits in `results`."""
        result = self.worker.run(self.plans.popleft())
        self.results.append(result)
        return result

    def deliver(self, place: int = 0) -> list[Any]:
        return self.dispatch(StepDone(self.results.pop(place)))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.results:
                self.execute()
            self.deliver()

    def run(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if not self.plans and not self.results:
                return
            self.step()
        raise AssertionError(f"still busy after {steps_max} steps")

    def run_until(self, name: str, phase: Phase, index: int = 0) -> None:
        for _ in range(1000):
            if self.phase(name, index) is phase:
                return
            self.step()
        raise AssertionError(f"{self.sequence(name, index)} never came to {phase}")

    def lose_worker(self, cause: LossCause = "died") -> None:
        self.dispatch(WorkerLost(self.instance.worker.epoch, cause=cause))

    def restart_worker(self, *, pool_kept: bool = False, fingerprint: bytes = b"") -> None:
        memory = self.worker.memory if pool_kept else {}
        last_incarnation = self.worker.last_incarnation  # survives restarts
        self.worker = FakeWorker(self.config.kv.block_size)
        self.worker.memory, self.worker.last_incarnation = memory, last_incarnation
        self.results.clear()
        if not pool_kept:
            self.pool_incarnation = PoolIncarnation(self.pool_incarnation + 1)
        self.dispatch(WorkerReady(self.instance.worker.epoch, self.pool_incarnation, fingerprint, self.steps_ahead))

    # Effects out

    def _collect(self, effect: object) -> None:
        match effect:
            case RunStep(plan):
                assert plan.step == len(self.history) + 1, "plans are numbered without a gap"
                self._check_plan(plan)
                self.plans.append(plan)
                self.history.append(plan)
            case Emit(tokens, ended, logprobs, begun):
                for one in begun:
                    self.begun[one.request, one.index] = one
                for request, attempt, index, position, token in each_token(tokens):
                    assert attempt == self.requests[request].attempt
                    self._hear(request, index, position, token)
                for request, index, thoughts in logprobs:
                    assert (request, index) not in self.ended, "log-probabilities after the end"
                    self.logprobs.setdefault((request, index), []).append(thoughts)
                for end in ended:
                    self._hear_end(end)
            case Refuse(request, refused):
                self.refused[request] = refused
            case RestartWorker():
                self.restarts.append(effect)
            case ModeChanged(mode):
                self.modes.append(mode)
            case StopWorker(epoch):
                self.stopped.append(epoch)
            case OrderAnswer(number, outcome):
                assert number not in self.orders, "an order is answered once"
                self.orders[number] = outcome
            case SendToCache() | RestartCache():
                self.on_cache_effect(effect)
            case Reserved() | Offer() | Release() | Released() | Adopted():
                self.on_handoff_effect(effect)
            case _:
                raise AssertionError(effect)

    def on_cache_effect(self, effect: object) -> None:
        raise AssertionError(effect)

    def on_handoff_effect(self, effect: object) -> None:
        raise AssertionError(effect)

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.config.scheduler
        assert plan.tokens <= scheduler.tokens_per_step
        assert len(plan.run.slots) <= scheduler.slots
        assert len(set(plan.run.slots)) == len(plan.run.slots), "a slot runs twice in a step"

    def _hear(self, request: str, index: int, position: int, token: int) -> None:
        key = (request, index)
        assert key not in self.ended, f"a token after the end of {key}"
        if key not in self.owed:
            self.owed[key] = undisturbed(self.requests[request], index)
        heard = self.tokens.setdefault(key, [])
        assert position == len(heard), "a position is emitted twice, or left out"
        heard.append(token)
        assert heard == self.owed[key][: len(heard)], f"{key} differs from the undisturbed run at output {len(heard) - 1}"

    def _hear_end(self, end: Ended) -> None:
        key = (end.request, end.index)
        assert key not in self.ended, f"{key} ended twice"
        assert end.output_tokens == len(self.tokens.get(key, []))
        assert end.prompt_tokens == len(self.requests[end.request].prompt)
        assert end.cached_tokens < end.prompt_tokens
        self.ended[key] = end

    # Questions

    def sequence(self, name: str, index: int = 0) -> Scheduled:
        return self.sequences[name][index]

    def phase(self, name: str, index: int = 0) -> Phase:
        return self.sequence(name, index).phase

    def heard(self, name: str, index: int = 0) -> list[int]:
        return self.tokens.get((name, index), [])

    def reason(self, name: str, index: int = 0) -> str | None:
        end = self.ended.get((name, index))
        return None if end is None else end.reason.value

    @property
    def seated(self) -> list[NewSequence]:
        """Every admission, in order, as the worker was told."""
        return [new for plan in self.history for new in plan.new]

    @property
    def admissions(self) -> list[str]:
        """Whose they were; known by the prompt, because a plan tells no names."""
        names = {request.prompt: name for name, request in self.requests.items()}
        return [names[new.tokens[: new.prompt_tokens]] for new in self.seated]

    @property
    def pool(self) -> Any:
        return self.instance.board.cache.pool

    # Verdicts

    def assert_answered(self, *names: str) -> None:
        """Each of these (all, if none is named) had its full undisturbed output."""
        for name in names or self.requests:
            request = self.requests[name]
            for index in range(request.n):
                owed = undisturbed(request, index)
                assert self.heard(name, index) == owed
                assert self.reason(name, index) == end_word(request, owed)

    def assert_at_rest(self) -> None:
        """Nothing is held, nothing is planned, nothing will happen."""
        instance, board = self.instance, self.instance.board
        assert not self.plans
        assert not instance.in_flight
        assert not instance.board.groups
        assert not board.kept
        assert not board.leased
        assert not board.loading
        assert not board.running
        assert not board.preempting
        assert not board.drops
        assert len(board.waiting) == board.queued == board.queued_tokens == board.slots.taken == 0
        assert self.pool.free + self.pool.idle == self.pool.total
        assert instance.next_deadline() is None
        check_rest(instance)
        for name, request in self.requests.items():
            assert all((name, index) in self.ended for index in range(request.n)), f"{name} never ended"


def make_request(name: str, prompt: Iterable[int] = (1, 2, 3), **given: Any) -> GenerateRequest:
    """`given` may name fields of the request and of its sampling."""
    sampling = {f: given.pop(f) for f in SamplingParams.__struct_fields__ if f in given}
    return GenerateRequest(id=RequestId(name), prompt=tuple(prompt), sampling=SamplingParams(**sampling), **given)


def stops(request: GenerateRequest, outputs: Sequence[int]) -> bool:
    return outputs[-1] in request.sampling.stop_token_ids and len(outputs) >= request.sampling.min_tokens


def repeats(request: GenerateRequest, outputs: Sequence[int]) -> bool:
    """The definition, without any skill."""
    rule = request.sampling.repetition_stop
    if rule is None or len(outputs) < request.sampling.min_tokens:
        return False
    for pattern in range(rule.pattern_min, rule.pattern_max + 1):
        needed = max(rule.count_min * pattern, rule.tokens_min)
        tail = outputs[-needed:]
        if len(tail) == needed and all(a == b for a, b in zip(tail, tail[pattern:], strict=False)):
            return True
    return False


def end_word(request: GenerateRequest, outputs: Sequence[int]) -> str:
    return "stop" if stops(request, outputs) else "repetition" if repeats(request, outputs) else "length"


def stop_at(place: int, prompt: Iterable[int] = (1, 2, 3), **given: Any) -> int:
    """A token that the undisturbed output of such a request has first as output number `place`."""
    outputs = undisturbed(make_request("?", prompt, **(given | {"max_tokens": place + 1})))
    assert outputs[place] not in outputs[:place], "choose another prompt: the token comes earlier too"
    return outputs[place]


def freeze(thing: Any, seen: dict[int, int] | None = None) -> Any:
    """The whole state under `thing` as plain comparable data: two equal answers mean that nothing has changed between."""
    seen = {} if seen is None else seen
    if isinstance(thing, (int, float, str, bytes, bytearray, type(None))):
        return repr(thing)
    if id(thing) in seen:
        return f"see {seen[id(thing)]}"
    seen[id(thing)] = len(seen)
    if isinstance(thing, dict):
        return [(freeze(key, seen), freeze(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        return [freeze(one, seen) for one in thing]
    names = [name for owner in type(thing).__mro__ for name in getattr(owner, "__slots__", ()) if name != "_handlers"]
    if type(thing).__module__.startswith(("baton.core.engine", "baton.core.handoff")) and names:
        return [(name, freeze(getattr(thing, name), seen)) for name in names]
    if type(thing).__module__.startswith("baton.core.kv") and names:
        return [(name, freeze(getattr(thing, name), seen)) for name in names if name != "_pack"]
    return repr(thing)
