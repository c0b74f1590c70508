"""Two instances and a router of a few lines between them: a hand-off on a bench.

    pair = Pair(block_size=4, chunk_tokens_max=4)
    pair.start("a", range(10), max_tokens=6)     # Expect goes to the decode instance
    pair.act()                                   # one smallest thing happens: a message, a copy, a step
    pair.run()                                   # ... until nothing is left to do
    pair.assert_answered(); pair.assert_at_rest()

The router checks every token against the undisturbed run, takes each position of the present attempt once, and passes messages
on. What is pulled is copied from the other worker's memory at that very moment: if something else is there by then, something
else is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec.structs import replace

from baton.core.effects import Refuse
from baton.core.events import BlocksMoved, Submit, Tick
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.moves import BlockMove, MoveResult
from baton.protocol.output import Emit, Ended, each_token
from baton.protocol.request import GenerateRequest, Refused
from baton.protocol.step import RowLogprobs

from .harness import end_word, make_request, undisturbed
from .tiered import TieredDriver

LEASE = 10.0
KEEP = 30.0


class Node(TieredDriver):
    """An instance that speaks with a router: what it says waits in `said`."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        self.said: deque[Any] = deque()
        self.other: Node | None = None
        super().__init__(**({"host_blocks": 0, "peers": True} | settings))

    def _collect(self, effect: object) -> None:
        if isinstance(effect, (Emit, Refuse)):
            self.said.append(effect)
        else:
            super()._collect(effect)

    def on_handoff_effect(self, effect: object) -> None:
        self.said.append(effect)

    def carry_out(self, kind: str = "", *, moved: int | None = None, error: str | None = None) -> None:
        place = self.kinds.index(kind) if kind else 0
        message = self.told[place]
        if not isinstance(message, BlockMove) or message.kind != "pull":
            super().carry_out(kind, moved=moved, error=error)
            return
        del self.told[place]
        count = len(message.device) if moved is None else moved
        self.dispatch(BlocksMoved(MoveResult(message.id, self.pull(message, count), 0.001, error)))

    def pull(self, move: BlockMove, count: int) -> int:
        other = self.other
        assert other is not None
        assert move.peer == other.name
        assert move.seconds_max > 0.0
        assert move.host == ()
        assert move.keys == ()
        assert len(move.device) == len(move.peer_blocks)
        if move.peer_pool != other.pool_incarnation or move.pool != self.pool_incarnation:
            return 0
        for own, theirs in list(zip(move.device, move.peer_blocks, strict=True))[:count]:
            for offset in range(self.config.kv.block_size):
                self.worker.memory.pop((own, offset), None)
                if (theirs, offset) in other.worker.memory:
                    self.worker.memory[own, offset] = other.worker.memory[theirs, offset]
        return count

    @property
    def heard(self) -> list[str]:  # type: ignore[override]
        return [type(message).__name__ for message in self.said]


class PairRequest:
    """One request as its router knows it."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.attempt = 1
        self.tokens: dict[int, list[int]] = {index: [] for index in request.wanted}
        self.ended: dict[int, Ended] = {}
        self.logprobs: dict[int, list[RowLogprobs]] = {index: [] for index in request.wanted}
        self.refused: list[Refused] = []
        self.prefilling = self.adopted = self.released = False
        self.adopted_tokens = -1
        self.kept: bool | None = None
        self.usage: Offer | None = None

    def present(self) -> GenerateRequest:
        """To be asked for now: what is open, with what was delivered."""
        open_ = tuple(index for index in self.tokens if index not in self.ended)
        return replace(
            self.request, attempt=self.attempt, indices=open_, outputs=tuple(tuple(self.tokens[index]) for index in open_)
        )

    def prefill(self) -> GenerateRequest:
        request = self.present()
        outputs = request.outputs[0]
        sampling = replace(request.sampling, max_tokens=len(outputs) + 1)
        return replace(request, indices=request.indices[:1], outputs=(outputs,), sampling=sampling)


class Pair:
    def __init__(self, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any) -> None:
        self.prefill = Node("prefill", **(both | (prefill or {})))
        self.decode = Node("decode", **(both | (decode or {})))
        self.prefill.other, self.decode.other = self.decode, self.prefill
        self.routed_requests: dict[str, PairRequest] = {}
        self.rng: Random | None = None

    # What the router does

    def start(self, name: str, prompt: Iterable[int] = (1, 2, 3), **given: Any) -> PairRequest:
        routed = self.routed_requests[name] = PairRequest(make_request(name, prompt, **given))
        self.expect(name)
        return routed

    def whole(self, name: str, node: Node, prompt: Iterable[int], **given: Any) -> PairRequest:
        """One instance does it all."""
        routed = self.routed_requests[name] = PairRequest(make_request(name, prompt, **given))
        routed.adopted = True
        node.dispatch(Submit(routed.request))
        return routed

    def expect(self, name: str) -> None:
        self.decode.dispatch(Reserve(self.routed_requests[name].present(), LEASE))

    def forget(self, name: str, attempt: int | None = None) -> None:
        message = Forget(RequestId(name), self.routed_requests[name].attempt if attempt is None else attempt)
        self.prefill.dispatch(message)
        self.decode.dispatch(message)

    def replay(self, name: str, *, whole: Node | None = None) -> None:
        """The next attempt, with all that was delivered. `whole`: one instance does it all."""
        routed = self.routed_requests[name]
        self.forget(name)
        routed.attempt += 1
        routed.prefilling = routed.adopted = routed.released = False
        if len(routed.ended) < len(routed.tokens):
            if whole is None:
                self.expect(name)
            else:
                whole.dispatch(Submit(routed.present()))

    def hear(self, node: Node) -> None:
        """The router hears the oldest of what the instance has said."""
        message = node.said.popleft()
        if isinstance(message, Emit):
            self._hear_tokens(node, message)
            return
        routed = self.routed_requests[message.offer.request if isinstance(message, PeerOffer) else message.request]
        if message.attempt != routed.attempt:
            return
        match message:
            case Refuse(_, refused):
                routed.refused.append(refused)
            case Reserved() if not routed.prefilling:
                assert node is self.decode
                routed.prefilling = True
                self.prefill.dispatch(Prefill(routed.prefill(), KEEP))
            case Offer():
                assert node is self.prefill
                if message.last:
                    routed.usage = message
                leader = routed.present().indices[0] if routed.present().indices else 0
                outputs = tuple(routed.tokens[leader]) if message.last else ()
                self.decode.dispatch(PeerOffer(message, (self.prefill.name,), outputs))
            case Release():
                self.prefill.dispatch(message)
            case Released(kept=kept):
                routed.kept = kept
                self.decode.dispatch(message)
            case Adopted(tokens=tokens):
                assert not routed.adopted, "adopted twice"
                routed.adopted, routed.adopted_tokens = True, tokens
                self.prefill.dispatch(Forget(message.request, message.attempt))
            case _:
                assert isinstance(message, Reserved)

    def _hear_tokens(self, node: Node, emit: Emit) -> None:
        for request, attempt, index, position, token in each_token(emit.tokens):
            routed = self.routed_requests[request]
            if attempt != routed.attempt:
                continue
            told = routed.tokens[index]
            assert index not in routed.ended
            assert position == len(told), "a position is emitted twice, or left out"
            told.append(token)
            assert told == undisturbed(routed.request, index)[: len(told)], f"{request} differs at {position}, from {node.name}"
        for request, index, thoughts in emit.logprobs:
            self.routed_requests[request].logprobs[index].append(thoughts)
        for end in emit.ended:
            routed = self.routed_requests[end.request]
            if end.attempt != routed.attempt:
                continue
            assert end.index not in routed.ended
            assert end.output_tokens == len(routed.tokens[end.index])
            routed.ended[end.index] = end
            if len(routed.ended) == len(routed.tokens) and not routed.adopted:
                self.forget(end.request)  # it ended before decode had it for itself
            elif node is self.prefill and not routed.adopted:
                self.replay(end.request)  # only the leader has ended

    # What happens

    def choices(self) -> list[Callable[[], None]]:
        """Everything that can happen next, the quickest things first."""
        found: list[Callable[[], None]] = []
        for node in (self.prefill, self.decode):
            if node.said:
                found.append(lambda node=node: self.hear(node))
        for node in (self.prefill, self.decode):
            if node.told:
                found.append(node.carry_out)
        for node in (self.prefill, self.decode):
            if node.plans or node.results:
                found.append(node.step)
        return found

    def act(self) -> bool:
        """One of them. False: nothing is left to do."""
        choices = self.choices()
        if choices:
            (choices[0] if self.rng is None else self.rng.choice(choices))()
        return bool(choices)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(20_000):
            if until() or not self.act():
                return
        raise AssertionError("never quiet")

    def hear_all(self) -> None:
        while self.prefill.said or self.decode.said:
            for node in (self.prefill, self.decode):
                if node.said:
                    self.hear(node)

    def advance(self, seconds: float) -> None:
        for node in (self.prefill, self.decode):
            node.now += seconds
            node.dispatch(Tick())

    # Verdicts

    def assert_answered(self, *names: str) -> None:
        for name in names or self.routed_requests:
            routed = self.routed_requests[name]
            for index in routed.tokens:
                owed = undisturbed(routed.request, index)
                assert routed.tokens[index] == owed, name
                assert routed.ended[index].reason.value == end_word(routed.request, owed)

    def assert_at_rest(self) -> None:
        for node in (self.prefill, self.decode):
            assert not node.said
            assert not node.told
            node.assert_at_rest()
