"""Anything may happen, in any order: what clients are told is right, and at rest everything is forgotten.

The room checks positions, ends and the router's books after every event (harness.py).
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.config import RouterConfig
from baton.core.cluster.events import InstanceMessage, RouterTick, StopAdmission
from baton.protocol.control import InstanceStats
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.protocol.ids import PoolIncarnation, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, Refused, SamplingParams

from .harness import NO_ROOM, Room, Scripted, hello, request, token

ROLES = ("mixed", "prefill", "decode")
REFUSALS = (None, None, NO_ROOM, Refused("draining"), Refused("queue_full", 9, 8), Refused("never_planned", 9, 8))
HELD = ((), (), (), (Reserved,), (Offer,), (Release,), (Released,), (Adopted,))


class AnyCluster(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.room = None
        self.number = 0
        self.lost = False

    @initialize(
        roles=st.lists(st.sampled_from(ROLES), min_size=1, max_size=4),
        policy=st.sampled_from(("prefix", "load")),
        slots=st.integers(1, 6),
        blocks=st.sampled_from((20, 60)),
    )
    def begin(self, roles, policy, slots, blocks):
        config = RouterConfig(
            policy=policy, handoff_tokens_min=8, queue_requests_max=12, migrations_max=2, queue_seconds_max=60.0
        )
        self.shape = {"slots": slots, "blocks": blocks}
        self.room = Room(*roles, config=config, **self.shape)
        self.late = []

    def one(self, number):
        live = list(self.room.live.values())
        return live[number % len(live)] if live else None

    @rule(
        tokens=st.sampled_from((3, 12, 40)),
        max_tokens=st.integers(1, 5),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        timeout=st.sampled_from((None, None, None, 3.0)),
        stop=st.booleans(),
    )
    def arrive(self, tokens, max_tokens, n, priority, timeout, stop):
        self.number += 1
        prompt = tuple((self.number % 3 + place) % 50 for place in range(tokens))
        ids = (token(prompt, 0, 1),) if stop else ()
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=ids)
        self.room.arrive(
            request(f"r{self.number}", prompt=prompt, n=n, priority=priority, timeout_seconds=timeout, sampling=sampling)
        )

    @rule(number=st.integers(0, 30), index=st.sampled_from((None, None, 0, 1)), reason=st.sampled_from(("abort", "stop")))
    def withdraw(self, number, index, reason):
        self.room.withdraw(f"r{number % (self.number + 1)}", index, FinishReason(reason))

    @rule(number=st.integers(0, 3))
    def compute(self, number):
        if (instance := self.one(number)) is not None:
            instance.step()

    @rule(number=st.integers(0, 3), count=st.integers(1, 5))
    def speak(self, number, count):
        instance = self.one(number)
        for _ in range(count):
            if instance is not None and instance.out and instance.session in self.room.live:
                message = instance.out.popleft()
                self.late.append((instance.session, message))
                self.room.say(instance, message)

    @rule()
    def settle(self):
        self.room.settle()

    @rule(seconds=st.sampled_from((0.25, 0.5, 1.25, 3.0)), silent=st.sampled_from((None, None, None, 0, 1)))
    def wait(self, seconds, silent):
        frozen = [] if silent is None or (instance := self.one(silent)) is None else [instance]
        self.room.wait(seconds, silent=frozen)

    @rule()
    def tick(self):
        self.room.dispatch(RouterTick())

    @rule(number=st.integers(0, 3), back=st.booleans())
    def kill(self, number, back):
        instance = self.one(number)
        if instance is not None:
            self.room.kill(instance)
            if back:
                self.room.restart(instance)

    @rule(role=st.sampled_from(ROLES))
    @precondition(lambda self: self.room is not None and len(self.room.live) < 4)
    def join(self, role):
        self.number += 1
        self.room.join(Scripted(hello(f"new-{self.number}", role, **self.shape)))

    @rule(number=st.integers(0, 3), refusal=st.sampled_from(REFUSALS))
    def refuse(self, number, refusal):
        if (instance := self.one(number)) is not None:
            instance.refuse = refusal

    @rule(number=st.integers(0, 3), held=st.sampled_from(HELD))
    def hold(self, number, held):
        if (instance := self.one(number)) is not None:
            instance.hold = held

    @rule(number=st.integers(0, 3), mode=st.sampled_from(("serving", "serving", "draining", "paused")))
    def change_mode(self, number, mode):
        if (instance := self.one(number)) is not None:
            self.room.say(instance, InstanceStats(mode=mode))

    @rule(number=st.integers(0, 3), error=st.sampled_from(("worker_gone", "row_failed")))
    def fail(self, number, error):
        instance = self.one(number)
        if instance is not None:
            for id, leg in list(instance.assigned.items()):
                if leg.kind in ("whole", "adopted"):
                    instance.fail(id, error)
                    return

    @rule(number=st.integers(0, 50))
    def repeat(self, number):
        """Something that was said before, by a session that is perhaps over."""
        if self.late:
            session, message = self.late[number % len(self.late)]
            if not isinstance(message, (Offer, Released, Release, Reserved, Adopted)) or session not in self.room.live:
                self.room.dispatch(InstanceMessage(session, message))

    @rule(number=st.integers(0, 3), id=st.integers(0, 20), attempt=st.integers(1, 4), kind=st.integers(0, 6))
    def nonsense(self, number, id, attempt, kind):
        """Of an attempt that this instance does not have."""
        instance = self.one(number)
        name = RequestId(f"r{id}")
        routed = self.room.router.coordinator.routed_requests.get(name)
        if instance is None or (routed is not None and routed.attempt == attempt):
            return
        self.room.say(
            instance,
            (
                Reserved(name, attempt, 0),
                Offer(name, attempt, PoolIncarnation(1), 0, (), 8, last=True),
                Release(name, attempt),
                Released(name, attempt, True),
                Adopted(name, attempt, 8),
                Emit([(name, attempt, 0, 0, [1])], []),
                Emit([], [Ended(name, 0, FinishReason.STOP, 3, 0, 0, 0, attempt=attempt)]),
            )[kind],
        )

    @invariant()
    def tokens_are_right(self):
        if self.room is None:
            return
        for (id, index), told in self.room.told.items():
            prompt = self.room.asked[id].prompt
            assert told == [token(prompt, index, place) for place in range(len(told))]
        for deadline in [self.room.router.next_deadline()]:
            assert deadline is not None or self.room.router.idle

    def teardown(self):
        """Everything heals; everybody who was let in gets an end, and nobody keeps anything."""
        if self.room is None:
            return
        room = self.room
        room.dispatch(StopAdmission())
        room.join(Scripted(hello("healer", "mixed", slots=8, blocks=60)))
        for instance in room.live.values():
            instance.hold, instance.refuse = (), None
            room.say(instance, InstanceStats(mode="serving"))
        for _ in range(60):
            room.wait(1.0)
            room.step()
            if room.router.idle:
                break
        room.at_rest()
        for id, asked in room.asked.items():
            if id in room.turned_away:
                assert not any(key[0] == id for key in (*room.told, *room.ends))
                continue
            for index in asked.wanted:
                if (ended := room.ends.get((id, index))) is None:
                    assert id in room.broken_off
                elif ended.reason is FinishReason.LENGTH:
                    assert len(room.told[id, index]) == asked.sampling.max_tokens


AnyCluster.TestCase.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnyCluster = AnyCluster.TestCase
