"""One request in the cluster: the instances that work on it, and the messages that send it again.

The base class is the ledger of tokens that the client has received (core/delivery/ledger.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.cluster.cluster_instance import ClusterInstance, Order
from baton.core.cluster.events import Session
from baton.core.cluster.handoff_table import RequestState
from baton.core.delivery.ledger import Ledger
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.marks import Mark
from baton.protocol.ids import BlockKey, Instant
from baton.protocol.instance import Heartbeat
from baton.protocol.output import Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused


class RoutedRequest(Ledger):
    __slots__ = (
        "alarm",
        "asked_at",
        "avoided",
        "base",
        "copied",
        "deadline",
        "decoder",
        "denied",
        "first",
        "handoff_seconds",
        "hasher",
        "identity",
        "keys",
        "led",
        "losses",
        "mark",
        "marks",
        "moved_at",
        "no_room_since",
        "order",
        "placed_blocks",
        "preempted",
        "prefill",
        "prompt_tokens",
        "queued_at",
        "refused",
        "renew_at",
        "short",
        "source",
        "state",
        "timeout_at",
        "unfit",
        "usage",
        "waited_for_lost",
        "withdraw_by",
    )

    def __init__(self, request: GenerateRequest, order: Order, now: Instant) -> None:
        super().__init__(request, now)
        self.order = order
        self.state = RequestState.QUEUED
        self.withdraw_by: Instant | None = None
        "Time at which the router ends withdrawn sequences itself, if the decode instance has not ended them."
        self.decoder: ClusterInstance | None = None
        "The instance that answers the request, or will answer it."
        self.prefill: ClusterInstance | None = None
        "The instance that computes the prompt, or keeps its blocks."
        self.prompt_tokens = 0
        "Uncached prompt tokens that the prefill instance computes, or will compute."
        self.source: Session | None = None
        "Session whose blocks the decode instance copies, also after the prefill instance is released."
        self.placed_blocks = 0
        "Blocks that it counts for at the decode instance (placed_blocks.py)."
        self.denied = False
        "Whether the source changed its blocks or keeps none, so that a failed copy does not count against this path."
        self.copied = False
        "Whether the prompt has arrived at the decode instance."
        self.base = 0
        "Number of the leader's tokens when the prompt was sent."
        self.first = True
        "Whether no instance has had the request yet."
        self.losses = 0
        self.avoided: dict[str, Instant] = {}
        "Instances that are not tried again, each until this time."
        self.preempted: dict[str, Instant] = {}
        "Instances that preempted the request, each with the time until which it is the last choice."
        self.short: dict[str, Heartbeat] = {}
        "Instances that had no room for the request, with their heartbeat at that time."
        self.unfit: dict[str, None] = {}
        "Instances that can never hold the request, as they reported."
        self.waited_for_lost = False
        "Whether an instance that could hold the request was lost, and the request waited in the queue for its return."
        self.refused: Refused | None = None
        "The last refusal of an unfit instance."
        self.usage: tuple[int, int, int] | None = None
        "Cached, host and storage tokens of the leader, as the first prefill reported."
        self.led = -1
        "Index of the sequence that `usage` belongs to."
        self.identity: bytes | None = None
        "Identity of the weights that computed the tokens so far. Other weights would continue differently."
        self.hasher: BlockHasher | None = None
        self.keys: list[BlockKey] = []
        "Keys of the prompt's blocks, computed by `hasher`."
        self.marks: list[Mark] = []
        "Marked blocks of the prompt, which the router's index knows."
        self.queued_at = now
        self.no_room_since: Instant | None = None
        "Time since which it is the first request for whose size no instance has room."
        self.asked_at = now
        self.handoff_seconds = 0.0
        self.mark = (0, 0)
        "Progress of the answer when the silence was last checked."
        self.moved_at: tuple[int, int] | None = None
        "Progress of the answer when the request was moved off a stalled worker."
        self.renew_at: Instant | None = None
        self.deadline = now
        "Deadline of the present state."
        self.timeout_at = None if request.timeout_seconds is None else Instant(now + request.timeout_seconds)
        self.alarm: Instant | None = None
        "Time of the request's alarm. Owned by core/cluster/alarms.py."

    def __repr__(self) -> str:
        where = f"{self.decoder!r}, {self.prefill!r}"
        return f"<RoutedRequest {self.id}.{self.attempt} {self.state.value} {list(self.open)} at {where}>"

    # Queries

    @property
    def leader(self) -> int:
        return next(iter(self.open))

    @property
    def progress(self) -> tuple[int, int]:
        """Progress of the answer. Equal values: nothing has arrived between."""
        return len(self.open), self.delivered_tokens

    @property
    def tokens(self) -> int:
        """Tokens to compute before the leader's next token."""
        return len(self.request.prompt) + len(next(iter(self.open.values())))

    @property
    def tokens_left(self) -> int:
        """Remaining tokens of the sequence that may become longest."""
        return self.request.sampling.max_tokens - min(map(len, self.open.values()))

    @property
    def tokens_max(self) -> int:
        return len(self.request.prompt) + self.request.sampling.max_tokens

    def avoids(self, instance: ClusterInstance, now: Instant) -> bool:
        return instance.name in self.unfit or self.avoided.get(instance.name, now) > now

    def is_short(self, instance: ClusterInstance) -> bool:
        """Whether the instance has sent no heartbeat since it had too little room for this request."""
        return self.short.get(instance.name) is instance.beat

    def was_preempted(self, instance: ClusterInstance, now: Instant) -> bool:
        """Whether this instance preempted the request recently."""
        return self.preempted.get(instance.name, now) > now

    def exceptions(self, now: Instant) -> list[str]:
        """Names of instances that the request cannot use now, each once."""
        if not self.unfit and not self.avoided:
            return []
        return [*self.unfit, *(name for name, until in self.avoided.items() if until > now and name not in self.unfit)]

    def preempted_by(self, now: Instant) -> list[str]:
        return [name for name, until in self.preempted.items() if until > now]

    def avoid(self, name: str, until: Instant, now: Instant) -> None:
        self.avoided = {other: at for other, at in self.avoided.items() if at > now}
        self.avoided[name] = until

    # Messages for instances

    def for_decode(self, now: Instant) -> GenerateRequest:
        """The request for the decode instance, without prompt log-probabilities: the prefill instance delivers them."""
        request = self.replay(now)
        if request.sampling.prompt_logprobs is None:
            return request
        return replace(request, sampling=replace(request.sampling, prompt_logprobs=None))

    def for_prefill(self, now: Instant) -> GenerateRequest:
        """The request for the prefill instance: the leader alone, limited to one more token."""
        request, delivered = self.replay(now), self.open[self.leader]
        return replace(
            request,
            indices=(self.leader,),
            outputs=(tuple(delivered),) if delivered else (),
            sampling=replace(request.sampling, max_tokens=len(delivered) + 1),
        )

    # Ends

    def end(self, index: int, reason: FinishReason) -> Ended:
        ended = super().end(index, reason)
        if self.usage is None or index != self.led:
            return ended
        cached, host, storage = self.usage
        return replace(ended, cached_tokens=cached, host_tokens=host, storage_tokens=storage)

    def end_as_reported(self, ended: Ended) -> Ended:
        """Close a sequence by an instance's end. A replay's cached tokens are replaced by those of the first prefill."""
        why = self.withdrawn.get(ended.index)
        tokens = self.close(ended.index)
        if why is not None and ended.reason is FinishReason.ABORT:  # instances report every withdrawal as ABORT
            ended = replace(ended, reason=why)
        if self.attempt == self.request.attempt and self.usage is None and ended.output_tokens == tokens:
            return ended
        cached, host, storage = ended.cached_tokens, ended.host_tokens, ended.storage_tokens
        if self.usage is not None and ended.index == self.led:
            cached, host, storage = self.usage
        cached = min(cached, max(0, ended.prompt_tokens - 1))
        return replace(
            ended,
            cached_tokens=cached,
            host_tokens=min(host, cached),
            storage_tokens=min(storage, cached),
            output_tokens=tokens,
        )
