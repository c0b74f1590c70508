"""Checks of a cluster beside those of its machines: offered blocks are computed, released blocks were kept, each attempt is
adopted once. Also tracks the stage of each hand-off, so that faults can strike there. Numbers are those of
docs/internals/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.handoff import Adopted, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import BlockId, RequestId
from baton.protocol.output import Emit, each_token
from baton.protocol.request import GenerateRequest
from baton.sim.plans import untagged
from baton.sim.process import WorkerProcess
from baton.sim.scenario import Scenario, Stage
from baton.sim.tags import TAG_BYTES, tag_bytes
from baton.sim.tiers_watch import KeyContents
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch

Attempt = tuple[str, int]

OFFERS_MIN = 4
"""Fewest offered prompts from which the share that arrives is checked."""


class WatchedEngine(Protocol):
    """An incarnation of an instance (engine.py)."""

    @property
    def instance(self) -> Instance: ...
    @property
    def process(self) -> WorkerProcess: ...


class KeptPrompt:
    """A prompt that a prefill instance has offered."""

    __slots__ = ("blocks", "index", "life", "tokens", "weights")

    def __init__(self, index: int) -> None:
        self.index = index
        self.life: object = None
        self.weights = 0
        "Weights that the prompt was computed with."
        self.tokens = 0
        self.blocks: list[tuple[BlockId, int]] = []
        "Each block, with its generation at the time of the offer."


class Parties:
    """Processes that work on a request, by instance number."""

    __slots__ = ("decode", "prefill", "router")

    def __init__(self, router: int) -> None:
        self.router = router
        self.prefill: int | None = None
        self.decode: int | None = None


class ClusterWatch(Watch):
    def __init__(self, scenario: Scenario, timeline: Timeline) -> None:
        super().__init__(scenario, timeline)
        self.contents = KeyContents(scenario.block_size, self.all_requests)
        self.parties: dict[str, Parties] = {}
        self.replayed: dict[str, None] = {}
        self.handoffs = 0
        "Prompts that were adopted."
        self.at_stage: Callable[[Stage, str], None] = lambda stage, request: None
        self._size = scenario.block_size
        cluster = scenario.cluster
        self._calm = cluster is not None and not scenario.faults and not any(each.host_blocks for each in cluster.instances)
        "Whether the scenario has no faults and no host tier."
        self._kept: dict[Attempt, KeptPrompt] = {}
        self._adopted: dict[Attempt, None] = {}
        self._granted: dict[Attempt, None] = {}
        self._held: dict[Attempt, None] = {}
        "Attempts whose sequence had blocks when its release came: they were not revoked for the growth of others."
        self._intact = False
        "Whether the blocks of the `Release` being handled were kept until now."
        self._computed_with: dict[tuple[str, int, int, int], int] = {}
        "Weights of each token that an instance has sent: request, attempt, sequence, position."
        self._pulling: dict[int, str] = {}
        "Request of the last offer that was sent to an instance, by instance."

    def arrives(self, request: str, router: int) -> None:
        self.parties[request] = Parties(router)
        self.at_stage("H0", request)

    # Messages from routers to instances
    def sent_to_instance(self, instance: int, engine: WatchedEngine, message: Any) -> None:
        """Check a message just before the instance handles it."""
        match message:
            case GenerateRequest():
                self.parties[message.id].decode = instance
                if message.attempt > 1:
                    self.replayed[message.id] = None
                    self.saw("a replay")
                    if any(message.outputs):
                        self.saw("a replay with tokens")
            case Reserve(request=request):
                self.parties[request.id].decode = instance
                if request.attempt > 1:
                    self.saw("a hand-off was tried again")
            case Prefill(request=request):
                self.parties[request.id].prefill = instance
                self._kept[request.id, request.attempt] = KeptPrompt(request.wanted[0])
                self.at_stage("H1", request.id)
            case PeerOffer(offer=offer):
                self._pulling[instance] = offer.request
            case Release():  # before it is read: then blocks may be handed on
                self._intact = self._is_intact(engine, (message.request, message.attempt))
            case Released():
                if not message.kept:
                    self.saw("a release was denied")
                elif (message.request, message.attempt) not in self._granted:
                    raise InvariantBroken(f"{message.request} gets a release that no router sent", invariant=37)
                elif _holds(engine, message.request, self._kept[message.request, message.attempt].index):
                    self._held[message.request, message.attempt] = None

    # Messages from instances

    def sent_by_instance(self, engine: WatchedEngine | None, effect: Any) -> None:
        match effect:
            case Reserved():
                self.at_stage("H4", effect.request)
            case Offer() if engine is not None:
                self._offered(engine, effect)
                if effect.last:
                    self.saw("a whole prompt was offered")
                    self.at_stage("H3", effect.request)
                else:
                    self.saw("a chunk was offered")
                    self.at_stage("H2", effect.request)
            case Release():
                self.at_stage("H6", effect.request)
            case Released() if engine is not None:
                self._released(effect)
            case Adopted():
                self._adoption(effect)

    def _offered(self, engine: WatchedEngine, offer: Offer) -> None:
        """38: all offered blocks are computed."""
        kept = self._kept.get((offer.request, offer.attempt))
        if kept is None:
            raise InvariantBroken(f"{offer.request} is offered, and no router asked for it", invariant=36)
        kept.life, kept.weights = engine, engine.process.worker.weights
        if not offer.tokens or (offer.last and not offer.blocks and len(kept.blocks) * self._size < offer.tokens):
            self.saw("what was offered could not be kept")
            return
        if offer.blocks and offer.place != len(kept.blocks):
            raise InvariantBroken(f"{offer.request} is offered from {offer.place} on, after {len(kept.blocks)}", invariant=39)
        generations = engine.instance.view.generations()
        kept.blocks += [(block, generations[block]) for block in offer.blocks]
        if len(kept.blocks) != -(-offer.tokens // self._size):
            raise InvariantBroken(f"{offer.request}: {len(kept.blocks)} blocks for {offer.tokens} tokens", invariant=39)
        kept.tokens = offer.tokens
        if not self.has_content(engine, offer.request, kept, offer.place):
            raise InvariantBroken(f"{offer.request} is offered from {offer.place} on, and is not computed", invariant=38)

    def has_content(self, engine: WatchedEngine, request: str, kept: KeptPrompt, begin: int = 0) -> bool:
        """Whether the kept blocks from `begin` on hold the tags of the request's tokens, under the weights they were
        computed with."""
        memory, oracle = engine.process.worker.pool, self.requests[request].oracles_of(kept.weights)[kept.index]
        for place in range(begin, len(kept.blocks)):
            first, last = place * self._size, min((place + 1) * self._size, kept.tokens)
            wanted = b"".join(tag_bytes(oracle.tag(position)) for position in range(first, last))
            if memory[kept.blocks[place][0]][: (last - first) * TAG_BYTES] != wanted:
                return False
        return True

    def _is_intact(self, engine: WatchedEngine, attempt: Attempt) -> bool:
        kept = self._kept.get(attempt)
        generations = engine.instance.view.generations()
        return (
            kept is not None
            and kept.life is engine
            and all(generations[block] == generation for block, generation in kept.blocks)
            and self.has_content(engine, attempt[0], kept)
        )

    def _released(self, released: Released) -> None:
        """37: blocks reported as kept have been kept."""
        if not released.kept:
            self.saw("a lease had lapsed")
        elif not self._intact:
            raise InvariantBroken(f"{released.request} is released, and was not kept until now", invariant=37)
        else:
            self._granted[released.request, released.attempt] = None
            self.at_stage("H7", released.request)

    def _adoption(self, adopted: Adopted) -> None:
        """36: each attempt is adopted once."""
        attempt = adopted.request, adopted.attempt
        if attempt in self._adopted:
            raise InvariantBroken(f"{adopted.request}.{adopted.attempt} is adopted twice", invariant=36)
        self._adopted[attempt] = None
        if attempt in self._granted and adopted.tokens:
            self.handoffs += 1
            if self._calm and attempt in self._held and adopted.tokens < (copied := self._kept[attempt].tokens):
                raise InvariantBroken(f"{adopted.request}: {adopted.tokens} of {copied} tokens are adopted", invariant=64)
            self.saw("a prompt was handed over")
            if adopted.tokens % self._size:
                self.saw("a part of a block was handed over")
        elif adopted.tokens % self._size:  # only whole blocks are found in a cache
            raise InvariantBroken(f"{adopted.request} is adopted, and was not released", invariant=37)
        else:
            self.saw("adopted without a release")
        self.at_stage("H8", adopted.request)

    def check_handoffs(self) -> None:
        """63: without faults, offered prompts arrive."""
        offered = self.sometimes.get("a whole prompt was offered", 0)
        if offered >= OFFERS_MIN and 2 * self.handoffs < offered:
            raise InvariantBroken(f"of {offered} prompts that were offered {self.handoffs} were handed over", invariant=63)

    def pulls(self, instance: int) -> None:
        request = self._pulling.get(instance)
        self.saw("blocks were pulled")
        if request is not None:
            self.at_stage("H5", request)

    def emitted(self, emit: Emit, weights: int) -> None:
        """Record the tokens that an instance with these weights sends."""
        for request, attempt, index, position, _ in each_token(emit.tokens):
            self._computed_with[untagged(request), attempt, index, position] = weights
        for ended in emit.ended:
            self.at_stage("H9", untagged(ended.request))

    # Messages to clients

    def delivered(self, emit: Emit) -> None:
        """59: all tokens of one answer are computed with the same weights."""
        for request, attempt, index, position, _ in each_token(emit.tokens):
            asked, weights = self.requests[request], self._computed_with[request, attempt, index, position]
            if asked.weights is None:
                asked.weights = weights
            elif asked.weights != weights:
                raise InvariantBroken(
                    f"{request}.{index}: token {position} is of weights {weights}, the answer of {asked.weights}",
                    invariant=59,
                )


def _holds(engine: WatchedEngine, request: RequestId, index: int) -> bool:
    """Whether this sequence of the request has blocks."""
    view = engine.instance.view
    ours = [each for each in view.request_ids() if untagged(each) == request]
    return any(sequence.blocks and sequence.index == index for each in ours for sequence in view.sequences(each))
