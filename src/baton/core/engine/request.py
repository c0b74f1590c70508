"""A request is one prompt; each of its n answers is a sequence, and sequences are scheduled. The table in phase.py lists the
phases of a sequence.
"""

from __future__ import annotations

from msgspec.structs import replace

from baton.config.values import DRAFTS_MAX
from baton.core.engine.phase import NEXT, Fact, Phase
from baton.core.repetition import tokens_until_repetition
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, BlockKey, Incarnation, Instant, Slot
from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams

QueueKey = tuple[int, float, int]
"""(priority, arrival, counter): smaller runs first and is preempted last."""


class LoadingReason:
    """Reason why a sequence is LOADING. One object per stay, so that a result of an earlier stay is recognised."""

    __slots__ = ()

    @property
    def gives_way(self) -> bool:
        """Whether the sequence's blocks may be revoked."""
        return False

    def ended(self) -> None:
        """End the stay: the sequence ends while LOADING."""


class PinnedBlocks:
    """Blocks of a prompt computed for another instance: they stay unchanged until that one has copied them.

        sequence    computing | preempted | computing | ended
        its blocks  |--------|             |---------|
        kept        |---- grows with what is computed ----|---- for keep_seconds ----| released, lapsed or revoked

    The board owns them (Board.kept), the hand-off decides about them (handoff/source.py). Giving them up is always allowed: the
    copying instance asks, before it uses its copy, whether they were kept all the time.
    """

    __slots__ = ("blocks", "chunk", "finished", "keep_seconds", "left", "offered", "sequence", "tokens", "void")

    def __init__(self, sequence: Sequence, keep_seconds: float) -> None:
        self.sequence = sequence
        "The sequence that computes the blocks. It may have ended."
        self.keep_seconds = keep_seconds
        self.blocks: list[BlockId] = []
        "Leading blocks of the sequence's table, each with its own reference."
        self.offered = 0
        "Number of blocks that were offered."
        self.chunk = 0
        "Maximum of tokens per step, while no other prompt is computed (handoff_chunks.py). 0: not chosen yet."
        self.left = 0
        "Tokens to compute when `chunk` was last used. If there are more, the prompt begins anew."
        self.tokens = 0
        "Tokens that the blocks cover, once the sequence has ended."
        self.finished = False
        "Whether the sequence has ended."
        self.void = False
        "Whether the blocks were released."


class Sequence:
    """Mutable and slotted: one per sequence, changed every step.

    tokens      |----------- prompt -----------|-- outputs received --|
    computed    |------- confirmed by results -------|
    scheduled   |------- planned, results may be in flight --------------|--|
    in_flight                                                         how many samples are not back yet
    drafts                                                            how many drafts are planned and not back yet

    With drafts `scheduled` is an upper bound: a result lowers it by the drafts that were refused or not made.
    """

    __slots__ = (
        "accepted_tokens",
        "admissions",
        "admitted_at",
        "attempt",
        "blocks",
        "cached_tokens",
        "capacity",
        "check_length",
        "computed",
        "declared_tokens",
        "drafted_tokens",
        "drafts",
        "drafts_max",
        "fetched_blocks",
        "group",
        "host_tokens",
        "in_flight",
        "incarnation",
        "index",
        "kept",
        "keys",
        "leads",
        "load",
        "load_anyway",
        "loaded_blocks",
        "min_length",
        "order",
        "phase",
        "preemptions",
        "priority",
        "prompt_tokens",
        "published",
        "pulled_tokens",
        "queued",
        "request",
        "root",
        "scheduled",
        "slot",
        "stop_ids",
        "stop_position",
        "storage_tokens",
        "suspect",
        "suspect_length",
        "suspect_losses",
        "target",
        "tiers_asked",
        "tokens",
    )

    def __init__(self, group: Group, index: int, order: QueueKey, root: BlockKey) -> None:
        request, sampling = group.request, group.request.sampling
        self.group = group
        self.request = request
        self.attempt = request.attempt
        self.index = index
        self.order = order
        "Place in the queue, kept for life."
        self.priority = order[0]
        self.root = root
        self.leads = not group.sequences
        "Sibling sequences, which are held until this sequence has its next token."
        self.phase = Phase.WAITING if self.leads else Phase.HELD
        self.tokens: list[int] = [*request.prompt, *request.delivered(index)]
        self.prompt_tokens = len(request.prompt)
        self.declared_tokens = sampling.max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.min_length = self.prompt_tokens + sampling.stop_length_min
        self.stop_position = self.prompt_tokens + sampling.max_tokens - 1
        "Maximum of positions to compute. The last token is sampled and never fed back, so it needs no KV."
        self.check_length = self.stop_position + 1
        """Length, prompt included, at which the sequence is checked next for an end by length or repetition (check_end). Before
        it only a stop id ends the sequence."""
        if sampling.repetition_stop is not None:
            self.check_length = self.prompt_tokens + 1
        self.queued = request.attempt == 1
        """Whether the sequence is not admitted yet, so it counts against the queue bounds. A replay does not: its first attempt
        was accepted."""
        self.admissions = 0
        self.admitted_at = Instant(0.0)
        "Time of the first admission."
        self.keys: list[BlockKey] = []
        self.blocks: list[BlockId] = []
        self.capacity = 0
        "Tokens that the blocks hold."
        self.computed = 0
        self.scheduled = 0
        self.published = 0
        "Leading blocks that were offered to the cache."
        self.target = 0
        "Tokens to prefill, frozen at admission for this incarnation."
        self.in_flight = 0
        self.drafts = 0
        "Number of draft tokens that are planned and not answered."
        self.drafts_max = DRAFTS_MAX if sampling.drafts_max is None else sampling.drafts_max
        "Maximum of drafts per step, by the request."
        self.drafted_tokens = self.accepted_tokens = 0
        "Number of draft tokens that were verified, and accepted."
        self.slot = Slot(-1)
        self.incarnation = Incarnation(0)
        self.cached_tokens = 0
        "Prompt tokens that the first admission did not have to compute."
        self.preemptions = 0
        self.load: LoadingReason | None = None
        "While LOADING: the current stay. Results of earlier ones are ignored."
        self.kept: PinnedBlocks | None = None
        "Blocks kept for another instance, for which this sequence computes the prompt (handoff/source.py)."
        self.pulled_tokens = 0
        "Tokens brought by a hand-off before the first admission (handoff/destination.py)."
        self.tiers_asked = False
        "Whether storage was asked since the sequence joined the queue, or need not be."
        self.load_anyway: bool | None = None
        "Whether to load though computing is quicker; decided once per stay in the queue. None: not decided."
        self.loaded_blocks = self.fetched_blocks = 0
        "Blocks brought by a lower tier before the first admission, and how many of them came from storage."
        self.host_tokens = self.storage_tokens = 0
        "Cached tokens that came from the host, and from storage."
        self.suspect = False
        "Whether a worker was lost while computing it, and it has not got past `suspect_length` since (recovery.py)."
        self.suspect_length = 0
        self.suspect_losses = 0
        "Number of worker losses in a row for which it is the only suspect."

    def __repr__(self) -> str:
        return (
            f"<{self.request.id}.{self.index} {self.phase.value} {len(self.tokens)} tokens, {self.computed} computed, "
            f"{len(self.blocks)} blocks, slot {self.slot}.{self.incarnation}>"
        )

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def must_compute_prompt(self) -> bool:
        """Whether the prompt must be computed: its log-probabilities, or the mean or the first of the hidden states, are wanted
        and not delivered: a cached block has none of them. The leader delivers them for all siblings."""
        sampling = self.request.sampling
        asks = sampling.prompt_logprobs is not None or sampling.pooling in ("mean", "cls")
        return asks and self.outputs == 0 and self is self.group.leader

    @property
    def gives_way(self) -> bool:
        """Whether the blocks of a sequence that does not run may be revoked."""
        return self.phase is Phase.WAITING or (self.load is not None and self.load.gives_way)

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason if the tokens are complete, else None. Only a replay of a complete answer begins with one."""
        if self.outputs and len(self.tokens) >= self.min_length and self.tokens[-1] in self.stop_ids:
            return FinishReason.STOP
        return self.check_end() if len(self.tokens) >= self.check_length else None

    def check_end(self) -> FinishReason | None:
        """The finish reason by length or repetition; None: `check_length` is when to check again. A repetition counts before
        the length: the length of a prompt that is computed for another instance is not the answer's."""
        length, sampling = len(self.tokens), self.request.sampling
        rule = sampling.repetition_stop
        if rule is not None:
            early = self.prompt_tokens + sampling.min_tokens - length
            missing = early if early > 0 else tokens_until_repetition(self.tokens, self.prompt_tokens, rule)
            if not missing:
                return FinishReason.REPETITION
            self.check_length = min(self.stop_position + 1, length + missing)
        return FinishReason.LENGTH if length > self.stop_position else None

    def advance(self, fact: Fact) -> None:
        phase = NEXT.get((self.phase, fact))
        if phase is None:
            raise InvariantBroken(f"{self!r}: {fact.value} in {self.phase.value} is not in the table", invariant=24)
        self.phase = phase

    def detach_blocks(self) -> list[BlockId]:
        """Remove and return the blocks; no token counts as computed any more. Tokens stay."""
        blocks, self.blocks = self.blocks, []
        self.capacity = self.computed = self.scheduled = self.published = self.target = 0
        return blocks


def by_urgency(sequence: Sequence) -> QueueKey:
    return sequence.order


class Group:
    """A request in service: its wanted sequences and its deadline. The first sequence leads: the others wait for the
    prompt that it computes, and find it in the cache."""

    __slots__ = ("deadline", "open", "private", "request", "sequences", "settings")

    def __init__(self, request: GenerateRequest, deadline: Instant | None, private: bytes = b"") -> None:
        self.request = request
        self.private = private
        "The request's own name space in the cache. Empty: shared with all of the same salt."
        self.deadline = deadline
        self.sequences: list[Sequence] = []
        self.settings = replace(request.sampling, max_tokens=SamplingParams().max_tokens, repetition_stop=None, drafts_max=None)
        "Sampling without the fields that only the scheduler needs, so that all prompts of a list share it on the wire."
        self.open = len(request.wanted)
        "Number of sequences that have not ended for the client."

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    def add(self, index: int, order: QueueKey, root: BlockKey) -> None:
        self.sequences.append(Sequence(self, index, order, root))
