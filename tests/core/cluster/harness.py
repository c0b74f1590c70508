"""A router, scripted instances and clients in one room. Nothing happens but what a test does: `settle` delivers messages until
nobody has one, `step` lets every instance compute a token, `wait` lets time pass with beats.

A scripted instance answers every message of the protocol, and computes tokens that depend on (prompt, index, position) only,
so that an undisturbed answer is known.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster.events import (
    CloseSession,
    Deliver,
    FailRequest,
    InstanceJoined,
    InstanceLeft,
    InstanceMessage,
    RejectRequest,
    RouterTick,
    RunPass,
    SchedulePass,
    SendToInstance,
    Session,
    SubmitRequest,
    WithdrawRequest,
)
from baton.core.cluster.router import Router
from baton.protocol.control import AbortRequest, InstanceReady, RefusedRequest
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import BlockId, Instant, PoolIncarnation, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import FinishReason, GenerateRequest, Refused, SamplingParams
from baton.sim.cluster.rest import check_router_rest

BLOCK = 4


def token(prompt, index, position):
    return (sum(prompt) * 7 + index * 31 + position * 3 + 5) % 1000


def request(id="r", tokens=40, max_tokens=4, n=1, **more):
    sampling = more.pop("sampling", SamplingParams(max_tokens=max_tokens))
    prompt = more.pop("prompt", tuple(range(1, tokens + 1)))
    return GenerateRequest(id=RequestId(id), prompt=prompt, sampling=sampling, n=n, **more)


def hello(name, role="mixed", *, blocks=64, slots=8, identity=b"m", layout=b"l", incarnation=1, refused=False, **ready):
    known = {
        "blocks": blocks,
        "block_size": BLOCK,
        "slots": slots,
        "vocab_size": 1000,
        "context_tokens": 4096,
        "identity": identity,
    }
    instance = InstanceReady(**{**known, **ready})
    return InstanceHello(name, incarnation, role, instance, layout, peers=(f"peer-{name}",), refused=refused)


class Leg:
    def __init__(self, request, kind):
        self.request = request
        self.kind = kind
        "whole, expected, prefill, kept or adopted"
        self.outputs = {index: list(request.delivered(index)) for index in request.wanted}
        self.computed = 0


class Scripted:
    """One instance."""

    def __init__(self, hello):
        self.hello = hello
        self.session = None
        self.assigned = {}
        self.out = deque()
        self.closed = {}
        "Highest attempt that is over, by request."
        self.heard = []
        "Everything it was told."
        self.refuse = None
        "What it says to anything new."
        self.hold = ()
        "Kinds of message that it does not answer."
        self.frozen = False
        "Its process is stopped: what it is sent lies in `unread` until it goes on."
        self.unread = deque()
        self.unreadable = ()
        "Instances from which it can copy nothing, by their messengers' addresses."
        self.lapsed = False
        "It has kept no prompt when it is asked for it."
        self.keeps_nothing = False
        "The blocks of a prompt are gone when all of it is computed."
        self.peer = ""
        "Whose blocks it was offered last."

    def _say(self, message):
        if type(message) not in self.hold:
            self.out.append(message)

    def record_alive(self, message):
        if self.frozen:
            self.unread.append(message)
            return
        self.heard.append(message)
        match message:
            case GenerateRequest():
                self._begin(message, "whole")
            case Reserve(request):
                leg = self.assigned.get(request.id)
                if (leg is not None and leg.request.attempt == request.attempt) or self._begin(request, "expected"):
                    self._say(Reserved(request.id, request.attempt, 0))
            case Prefill(request):
                self._begin(request, "prefill")
            case PeerOffer(offer, (peer,), outputs):
                self.peer = peer
                leg = self._leg(offer)
                if leg is not None and leg.kind == "expected" and offer.last:
                    leg.outputs[next(iter(leg.outputs))] = list(outputs)
                    if offer.tokens:
                        self._say(Release(offer.request, offer.attempt))
                    else:
                        leg.kind = "adopted"
                        self._say(Adopted(offer.request, offer.attempt, 0))
            case Release(request, attempt):
                leg = self._leg(message)
                kept = leg is not None and leg.kind == "kept" and not self.lapsed
                self.assigned.pop(request, None)
                self._say(Released(request, attempt, kept))
            case Released(request, attempt, kept):
                leg = self._leg(message)
                if leg is not None and leg.kind == "expected":
                    leg.kind = "adopted"
                    came = kept and self.peer not in self.unreadable
                    self._say(Adopted(request, attempt, len(leg.request.prompt) if came else 0, "" if came else "no route"))
            case AbortRequest(request, index, reason):
                leg = self.assigned.get(request)
                if leg is not None:
                    self._say(Emit([], [self._end(leg, each, reason) for each in list(leg.outputs) if index in (None, each)]))
            case Forget(request, attempt):
                self.closed[request] = max(attempt, self.closed.get(request, 0))
                leg = self.assigned.get(request)
                if leg is not None and leg.request.attempt <= attempt:
                    del self.assigned[request]

    def thaw(self):
        self.frozen = False
        while self.unread:
            self.record_alive(self.unread.popleft())

    def _begin(self, request, kind):
        assert request.attempt > self.closed.get(request.id, 0), "a late message of a closed attempt"
        if self.refuse is not None:
            self._say(RefusedRequest(request.id, self.refuse, request.attempt))
            return False
        self.assigned[request.id] = Leg(request, kind)
        return True

    def _leg(self, message):
        leg = self.assigned.get(message.request)
        return leg if leg is not None and leg.request.attempt == message.attempt else None

    def _end(self, leg, index, reason, **more):
        told = leg.outputs.pop(index)
        if not leg.outputs:
            self.assigned.pop(leg.request.id, None)
        return Ended(
            leg.request.id, index, reason, len(leg.request.prompt), 0, len(told), 0, attempt=leg.request.attempt, **more
        )

    def step(self):
        """One token of everything that runs."""
        if self.frozen:
            return
        rows, ended, offers = [], [], []
        for leg in list(self.assigned.values()):
            if leg.kind in ("expected", "kept"):
                continue
            request = leg.request
            if leg.kind == "prefill" and not leg.computed:
                leg.computed = len(request.prompt) // 2
                offers.append(self._offer(leg, last=False))
                continue
            for index in list(leg.outputs):
                told = leg.outputs[index]
                value = token(request.prompt, index, len(told))
                rows.append((request.id, request.attempt, index, len(told), [value]))
                told.append(value)
                if value in request.sampling.stop_token_ids:
                    ended.append(self._end(leg, index, FinishReason.STOP))
                elif leg.kind == "prefill":
                    leg.kind, leg.computed = "kept", len(request.prompt)
                    offers.append(self._offer(leg, last=True))
                elif len(told) >= request.sampling.max_tokens:
                    ended.append(self._end(leg, index, FinishReason.LENGTH))
        if rows or ended:
            self._say(Emit(rows, ended))
        for offer in offers:
            self._say(offer)

    def _offer(self, leg, last):
        request = leg.request
        cached = 8 if last else 0
        blocks, tokens = ((), 0) if last and self.keeps_nothing else ((BlockId(1),), leg.computed)
        return Offer(request.id, request.attempt, PoolIncarnation(1), 0, blocks, tokens, last, cached_tokens=cached)

    def fail(self, id, error="worker_gone"):
        leg = self.assigned[id]
        self._say(Emit([], [self._end(leg, index, FinishReason.ERROR, error=error) for index in list(leg.outputs)]))

    def beat(self):
        """As an instance with blocks for everything."""
        taken = sum(len(leg.outputs) for leg in self.assigned.values() if leg.kind in ("whole", "adopted"))
        return Heartbeat(
            token_seconds=0.0, blocks_available=self.hello.ready.blocks, slots_free=max(0, self.hello.ready.slots - taken)
        )


class Room:
    def __init__(self, *roles, config=None, **more):
        self.config = config or RouterConfig(handoff_tokens_min=8)
        self.router = Router(self.config)
        self.now = 100.0
        self.sessions = count(1)
        self.live = {}
        "Instances by session."
        self.told = {}
        self.ends = {}
        self.turned_away = {}
        self.broken_off = {}
        self.hung_up = {}
        self.asked = {}
        self.emits = []
        self.prompts = []
        self.instances = []
        self.holds_passes = False
        "A test runs them itself."
        for number, role in enumerate(roles):
            self.join(Scripted(hello(f"{role}-{number}", role, **more)))

    def join(self, instance):
        instance.session = Session(next(self.sessions))
        self.live[instance.session] = instance
        if instance not in self.instances:
            self.instances.append(instance)
        self.dispatch(InstanceJoined(instance.session, instance.hello))
        return instance

    def dispatch(self, event):
        """The event, and the end of a turn of the event loop."""
        effects = self.handle(event)
        if any(isinstance(effect, SchedulePass) for effect in effects) and not self.holds_passes:
            effects += self.dispatch(RunPass())
        return [effect for effect in effects if not isinstance(effect, SchedulePass)]

    def handle(self, event):
        """The event alone."""
        effects = self.router.handle(event, Instant(self.now))
        for effect in effects:
            self._do(effect)
        self.router.check()
        return effects

    def _do(self, effect):
        match effect:
            case SendToInstance(session, message):
                if session in self.live:
                    self.live[session].record_alive(message)
            case Deliver(emit):
                self._deliver(emit)
            case RejectRequest(id, refused):
                assert id not in self.turned_away
                assert not any(key[0] == id for key in self.told)
                self.turned_away[id] = refused
            case FailRequest(id, error):
                assert id not in self.broken_off
                self.broken_off[id] = error
            case CloseSession(session=session, reason=reason):
                self.hung_up[session] = reason
                self.live.pop(session, None)

    def _deliver(self, emit):
        self.emits.append(emit)
        for id, _, index, position, value in each_token(emit.tokens):
            told = self.told.setdefault((id, index), [])
            assert (id, index) not in self.ends, "a token after the end"
            assert id not in self.broken_off
            assert position == len(told), "not the next token"
            told.append(value)
        for id, index, row in emit.logprobs:
            self.prompts.append((id, index, row))
        for ended in emit.ended:
            key = (ended.request, ended.index)
            assert key not in self.ends, "a second end"
            assert ended.output_tokens == len(self.told.get(key, []))
            self.ends[key] = ended

    def arrive(self, request):
        self.asked[request.id] = request
        return self.dispatch(SubmitRequest(request))

    def withdraw(self, id="r", index=None, reason=FinishReason.ABORT):
        return self.dispatch(WithdrawRequest(RequestId(id), index, reason))

    def say(self, instance, message):
        return self.dispatch(InstanceMessage(instance.session, message))

    def settle(self):
        """Until nobody has anything to say."""
        for _ in range(1000):
            speakers = [instance for instance in self.live.values() if instance.out and not instance.frozen]
            if not speakers:
                return
            for instance in speakers:
                if self.live.get(instance.session) is instance and instance.out:
                    self.say(instance, instance.out.popleft())
        raise AssertionError("they talk for ever")

    def step(self, count=1):
        for _ in range(count):
            for instance in list(self.live.values()):
                instance.step()
            self.settle()

    def wait(self, seconds, silent=()):
        """Beats come, deadlines are kept. Who is silent is frozen meanwhile."""
        for instance in silent:
            instance.frozen = True
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for instance in list(self.live.values()):
                if instance not in silent and instance.session in self.live:
                    self.say(instance, instance.beat())
            deadline = self.router.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.dispatch(RouterTick())
            self.settle()
        for instance in silent:
            instance.thaw()

    def kill(self, instance):
        self.live.pop(instance.session)
        instance.assigned.clear()
        instance.out.clear()
        self.dispatch(InstanceLeft(instance.session, "it was killed"))

    def restart(self, instance):
        fresh = Scripted(replace(instance.hello, incarnation=instance.hello.incarnation + 1))
        self.instances.remove(instance)
        return self.join(fresh)

    def run(self, steps=60):
        """To the end."""
        for _ in range(steps):
            self.settle()
            if self.router.idle:
                break
            self.step()
            self.wait(0.3)
        self.at_rest()

    def at_rest(self):
        """Nobody is owed anything, nobody has anything."""
        assert self.router.idle
        self.settle()
        for instance in self.live.values():
            assert not instance.assigned, (instance.hello.name, list(instance.assigned))
        for member in self.router.membership.instances.values():
            assert (member.assigned, member.prompts, member.sequences) == ({}, 0, 0)
        check_router_rest(self.router, self.config)

    def assert_right(self, id="r", reason=FinishReason.LENGTH):
        """The tokens of an undisturbed run, and its end."""
        request = self.asked[RequestId(id)]
        for index in request.wanted:
            expected = [token(request.prompt, index, place) for place in range(request.sampling.max_tokens)]
            assert self.told[id, index] == expected
            assert self.ends[id, index].reason is reason

    @property
    def routed(self):
        (routed,) = self.router.coordinator.routed_requests.values()
        return routed


NO_ROOM = Refused("no_room", 10, 2)
