"""The front of one engine as a machine: losses, other weights, withdrawals, and clients that leave, in every order.

The oracle is a list per client: each position holds one right token, and an answer that has begun keeps its weights.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.delivery.front import (
    ClientRequest,
    ClientWithdrawal,
    Close,
    End,
    EngineLost,
    EngineReady,
    FailClient,
    FrontMachine,
    Leave,
    RefuseClient,
    Reject,
    Replay,
    SendAbort,
    SendRequest,
    Unsendable,
    WeightsChanged,
)
from baton.errors import InvariantBroken, Unavailable
from baton.protocol.control import AbortRequest
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import OTHER_WEIGHTS, Delta, Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused, SamplingParams

A, B = RequestId("a"), RequestId("b")
NOW = Instant(0.0)


class Sink:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Ended] = {}
        self.error: Exception | Refused | None = None

    def deliver(self, delta: Delta) -> None:
        assert delta.index not in self.ends
        assert self.error is None
        self.tokens.setdefault(delta.index, []).extend(delta.tokens)
        if delta.ended is not None:
            self.ends[delta.index] = delta.ended

    def add_prompt(self, row) -> None:
        raise AssertionError


def request(name: RequestId = A, n: int = 1, max_tokens: int = 9, **more) -> GenerateRequest:
    return GenerateRequest(id=name, prompt=(1, 2), n=n, sampling=SamplingParams(max_tokens=max_tokens), **more)


def served(*requests: GenerateRequest) -> tuple[FrontMachine, list[Sink]]:
    front, sinks = FrontMachine(), []
    front.handle(EngineReady(b"one"), NOW)
    for each in requests:
        sinks.append(Sink())
        assert front.handle(ClientRequest(each, sinks[-1]), NOW) == [SendRequest(each)]
    return front, sinks


def row(position: int, token: int, *, name: RequestId = A, index: int = 0, attempt: int = 1):
    return (name, attempt, index, position, token)


def lost_and_ready(front: FrontMachine, identity: bytes = b"one", at: float = 2.0):
    return [*front.handle(EngineLost("killed"), NOW), *front.handle(EngineReady(identity), Instant(at))]


def test_a_replay_continues_at_the_next_position_of_each_open_sequence():
    front, (sink,) = served(request(n=3, timeout_seconds=5.0))
    front.take(Emit([row(0, 5), row(0, 6, index=1), row(1, 7)], [Ended(A, 1, FinishReason.STOP, 2, 0, 1, 0)]))
    (again,) = lost_and_ready(front)
    assert type(again) is Replay
    assert (again.request.attempt, again.request.indices, again.request.outputs) == (2, (0, 2), ((5, 7), ()))
    assert (again.request.age_seconds, again.request.timeout_seconds) == (2.0, 3.0)
    front.take(Emit([row(2, 99), row(2, 8, attempt=2), row(2, 8, attempt=2)], []))
    assert sink.tokens == {0: [5, 7, 8], 1: [6]}


def test_a_sequence_whose_tokens_are_complete_is_not_replayed():
    front, (sink,) = served(request(max_tokens=2))
    front.take(Emit([row(0, 5), row(1, 6)], []))
    (end,) = lost_and_ready(front)
    assert type(end) is End
    assert (end.delta.ended.reason, end.delta.ended.output_tokens) == (FinishReason.LENGTH, 2)
    assert end.sink is sink
    assert not front.ledgers


def test_other_weights_end_what_has_begun_and_begin_the_rest_anew():
    front, (begun, _) = served(request(), request(B))
    front.take(Emit([row(0, 5)], []))
    fail, again = lost_and_ready(front, b"two")
    assert (type(fail), fail.sink, str(fail.error)) == (FailClient, begun, OTHER_WEIGHTS)
    assert (type(again), again.request.id, again.request.outputs) == (Replay, B, ())
    assert list(front.ledgers) == [B]


def test_weights_that_changed_in_a_living_engine_are_those_of_the_next():
    front, _ = served(request())
    front.handle(WeightsChanged(b"two"), NOW)
    front.take(Emit([row(0, 5)], []))
    (again,) = lost_and_ready(front, b"two")
    assert type(again) is Replay


@pytest.mark.parametrize("before", [True, False], ids=["before the loss", "after it"])
def test_what_is_withdrawn_ends_without_an_engine(before: bool):
    front, _ = served(request(n=2))
    front.take(Emit([row(0, 5)], []))
    withdraw = ClientWithdrawal(A, 0, FinishReason.STOP)
    if before:
        assert front.handle(withdraw, NOW) == [SendAbort(AbortRequest(A, 0, FinishReason.STOP))]
        (end,) = front.handle(EngineLost("killed"), NOW)
    else:
        assert front.handle(EngineLost("killed"), NOW) == []
        (end,) = front.handle(withdraw, NOW)
    assert (end.delta.ended.reason, end.delta.ended.output_tokens) == (FinishReason.STOP, 1)
    front.check()
    (again,) = front.handle(EngineReady(b"one"), NOW)
    assert again.request.indices == (1,)


def test_a_client_that_leaves_is_aborted_and_only_with_its_own_sink():
    front, (sink,) = served(request())
    twice = Sink()
    assert front.handle(ClientRequest(request(), twice), NOW) == [RefuseClient(twice, Refused("duplicate_id"))]
    assert front.handle(Leave(A, twice), NOW) == []
    assert front.handle(Leave(A, sink), NOW) == [SendAbort(AbortRequest(A))]
    assert front.handle(ClientWithdrawal(A), NOW) == front.handle(Leave(A, sink), NOW) == []
    assert not front.ledgers


def test_a_client_that_leaves_without_an_engine_is_forgotten():
    front, (sink,) = served(request())
    front.handle(EngineLost("killed"), NOW)
    assert front.handle(Leave(A, sink), NOW) == []
    assert front.handle(EngineReady(b"one"), NOW) == []


def test_without_an_engine_and_after_the_end_requests_fail_at_once():
    front, (_,) = served(request())
    front.handle(EngineLost("try later"), NOW)
    late = Sink()
    (fail,) = front.handle(ClientRequest(request(B), late), NOW)
    assert (type(fail), fail.sink, str(fail.error)) == (FailClient, late, "try later")
    error = Unavailable("the server ends")
    assert [effect.error for effect in front.handle(Close(error), NOW)] == [error]
    assert front.handle(ClientRequest(request(B), late), NOW) == [FailClient(late, error)]
    front.check()


def test_a_refused_replay_breaks_off_and_a_refused_request_does_not_begin():
    front, (first, second) = served(request(), request(B))
    assert front.handle(Reject(B, Refused("paused")), NOW) == [RefuseClient(second, Refused("paused"))]
    lost_and_ready(front)
    (fail,) = front.handle(Reject(A, Refused("paused")), NOW)
    assert (type(fail), fail.sink) == (FailClient, first)
    assert "does not go on" in str(fail.error)
    assert front.handle(Reject(A, Refused("paused")), NOW) == []


def test_a_request_that_cannot_be_sent_fails_alone():
    front, (first, _) = served(request(), request(B))
    error = Unavailable("too large")
    assert front.handle(Unsendable(A, error), NOW) == [FailClient(first, error)]
    assert list(front.ledgers) == [B]


@pytest.mark.parametrize("gathered", [False, True])
def test_a_missing_token_ends_the_request_and_no_other(gathered: bool):
    front, (broken, whole) = served(request(), request(B))
    ends = [Ended(B, 0, FinishReason.STOP, 2, 0, 1, 0)] if gathered else []
    abort, fail = front.take(Emit([row(1, 6), row(2, 7), row(0, 5, name=B)], ends))
    assert abort == SendAbort(AbortRequest(A))
    assert (type(fail), fail.sink, type(fail.error)) == (FailClient, broken, InvariantBroken)
    assert (broken.tokens, whole.tokens) == ({}, {0: [5]})


OPERATIONS = st.sampled_from(["step", "late", "lose", "ready", "reload", "leave", "stop", "arrive"])


class Rig:
    """An engine that computes the right token of each position, and clients that check what they are given."""

    def __init__(self) -> None:
        self.front, self.weights = FrontMachine(), 0
        self.engine: dict[RequestId, GenerateRequest] | None = {}
        self.late: list[Emit] = []
        self.sinks: dict[RequestId, Sink] = {}
        self.do(EngineReady(b"0"))

    def do(self, event) -> None:
        for effect in self.front.handle(event, NOW):
            match effect:
                case SendRequest(sent) | Replay(sent):
                    assert self.engine is not None
                    self.engine[sent.id] = sent
                case SendAbort(message):
                    assert self.engine is not None
                    self._abort(message)
                case End(sink, delta):
                    sink.deliver(delta)
                case FailClient(sink, error) | RefuseClient(sink, error):
                    sink.error = error
        self.front.check()

    def _abort(self, message: AbortRequest) -> None:
        sent = self.engine.get(message.request)
        if sent is not None and message.index is None:
            del self.engine[message.request]

    def token(self, name: RequestId, index: int, position: int) -> int:
        return 1000 * self.weights + 100 * index + position

    def step(self) -> None:
        """One token for each sequence of each request, with the ends that come with it."""
        rows, ends = [], []
        for sent in list((self.engine or {}).values()):
            given, owed = [], []
            for index in sent.wanted:
                position = len(sent.delivered(index))
                rows.append(
                    row(position, self.token(sent.id, index, position), name=sent.id, index=index, attempt=sent.attempt)
                )
                given.append((*sent.delivered(index), 0))
                if position + 1 >= sent.sampling.max_tokens:
                    ends.append(Ended(sent.id, index, FinishReason.LENGTH, 2, 0, position + 1, 0, attempt=sent.attempt))
                else:
                    owed.append((index, given[-1]))
            if owed:
                more = {"indices": tuple(i for i, _ in owed), "outputs": tuple(o for _, o in owed)}
                self.engine[sent.id] = GenerateRequest(
                    id=sent.id, prompt=(1, 2), n=sent.n, sampling=sent.sampling, attempt=sent.attempt, **more
                )
            else:
                del self.engine[sent.id]
        emit = Emit(rows, ends)
        self.late.append(emit)
        assert self.front.take(emit) == []

    def run(self, operation: str, number: int) -> None:
        names = list(self.front.ledgers)
        name = names[number % len(names)] if names else None
        match operation:
            case "step":
                self.step()
            case "late" if self.late:  # an earlier emit arrives again
                assert self.front.take(self.late[number % len(self.late)]) == []
            case "lose" if self.engine is not None:
                self.engine = None
                self.do(EngineLost("killed"))
            case "ready" | "reload" if self.engine is None:
                self.weights += operation == "reload"
                self.engine = {}
                self.do(EngineReady(b"%d" % self.weights))
            case "leave" if name is not None:
                self.do(Leave(name, self.front.ledgers[name].sink))
            case "stop" if name is not None:
                self.do(ClientWithdrawal(name, number % 2, FinishReason.STOP))
            case "arrive" if self.engine is not None:
                sink, wanted = Sink(), request(RequestId(f"r{len(self.sinks)}"), 1 + number % 2, 1 + number % 5)
                self.sinks[wanted.id] = sink
                self.do(ClientRequest(wanted, sink))
        for sink in self.sinks.values():
            weights = {token // 1000 for tokens in sink.tokens.values() for token in tokens}
            assert len(weights) <= 1
            for index, tokens in sink.tokens.items():
                assert [token % 1000 for token in tokens] == [100 * index + place for place in range(len(tokens))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 9)), max_size=60))
def test_whatever_happens_each_position_is_delivered_once_and_nothing_is_left(plan):
    rig = Rig()
    rig.run("arrive", 4)
    rig.run("arrive", 9)
    for operation, number in plan:
        rig.run(operation, number)
    rig.run("ready", 0)
    for _ in range(6):
        rig.run("step", 0)
    assert not rig.front.ledgers
