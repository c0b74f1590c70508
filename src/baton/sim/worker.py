"""The simulated worker: executes plans on the tag machine, and nothing else.

It keeps, as the real one does, each occupant's tokens and block table, and reads every context through that table. It also
knows, as the real one cannot, the right content: a block with other content is caught at the read (invariant 12).
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from baton.errors import InvariantBroken
from baton.protocol.ids import Incarnation, Slot
from baton.protocol.request import SamplingParams
from baton.protocol.step import (
    PREEMPTED_TOKEN_ID,
    NewSequence,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from baton.sim.noise import noise
from baton.sim.scenario import Client
from baton.sim.tags import TAG_BYTES, draw, first_tag, logprob, next_tag, tag_bytes


class WorkerDied(Exception):
    """The process dies in the middle of a step; its writes so far are in the pool."""

    def __init__(self, client: Client | None = None) -> None:
        super().__init__()
        self.client = client
        "The client whose poison killed it."


class SimulatedSlot:
    __slots__ = ("asks", "client", "computed", "expected", "failed", "incarnation", "index", "prompt_tokens", "sampling",
                 "table", "tag", "tokens")  # fmt: skip

    def __init__(self, new: NewSequence, client: Client, sampling: SamplingParams, weights: int) -> None:
        self.client = client
        self.sampling = sampling
        self.asks = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.incarnation = new.incarnation
        self.index = new.index
        self.tokens = list(new.tokens)
        self.prompt_tokens = new.prompt_tokens
        self.table = list(new.blocks)
        self.computed = 0
        self.tag = first_tag(client.salt.encode(), weights)
        self.expected = bytearray()
        self.failed = False
        for token in self.tokens[: new.computed_tokens]:
            self.compute(token)

    def compute(self, token: int) -> bytes:
        self.tag = next_tag(self.tag, token)
        tag = tag_bytes(self.tag)
        self.expected += tag
        self.computed += 1
        return tag


class SimWorker:
    def __init__(
        self,
        blocks: int,
        block_size: int,
        client_of: Callable[[int, int], Client],
        seed: int = 0,
        draft_truth: float = 0.0,
    ) -> None:
        """`draft_truth`: probability that a draft is the true token."""
        self._size = block_size
        self._seed = seed
        self._draft_truth = draft_truth
        self._client_of = client_of
        self.weights = 0
        "Weights that this process has loaded."
        self.states: dict[int, SimulatedSlot] = {}
        self.pool = [bytearray(TAG_BYTES * block_size) for _ in range(blocks)]

    def die(self, pool_kept: bool) -> None:
        self.states.clear()
        if not pool_kept:
            # The new pool is other memory with junk in it: reading it is detected. Processes that map the old one still have
            # it.
            self.pool = [bytearray(bytes([0xA5 ^ number & 0xFF]) * len(block)) for number, block in enumerate(self.pool)]

    def scribble(self) -> None:
        for number, block in enumerate(self.pool):
            block[:] = bytes([0xC3 ^ number & 0xFF]) * len(block)

    def execute(self, plan: StepPlan, die_after: int | None = None) -> StepResult:
        """Execute a plan. `die_after`: the process dies when it has computed that many rows."""
        self._take_in(plan)
        incarnations: list[Incarnation] = []
        lengths: list[int] = []
        values: list[int] = []
        failures: list[RowFailure] = []
        logprobs: list[RowLogprobs] = []
        drafted = [0] * len(plan.run.drafts)
        for number, (slot, count) in enumerate(zip(plan.run.slots, plan.run.counts, strict=True)):
            if number == die_after:
                raise WorkerDied
            state = self.states[slot]
            tag, begin = state.tag, state.computed
            sampled = self._row(plan, slot, state, count)
            after, end = state.tag, state.computed
            more: list[TokenLogprob] = []
            if drafted and plan.run.drafts[number] and sampled:
                drafted[number], more = self._verify(plan, slot, state, plan.run.drafts[number])
            incarnations.append(state.incarnation)
            lengths.append(len(sampled) + len(more))
            values += sampled
            values += [each.token for each in more]
            if state.failed:
                failures.append(RowFailure(slot, state.incarnation, "NaN in the logits"))
            elif state.asks and (row := _row_logprobs(slot, state, tag, begin, after, end, sampled)) is not None:
                logprobs.append(row)
                logprobs += [RowLogprobs(slot, state.incarnation, each) for each in more]
        for _, incarnation in plan.drops:
            incarnations.append(incarnation)
            lengths.append(1)
            values.append(PREEMPTED_TOKEN_ID)
        columns = (plan.rows, tuple(incarnations), tuple(lengths), tuple(values))
        return StepResult(plan.step, plan.epoch, *columns, tuple(failures), tuple(logprobs), tuple(drafted))

    def _take_in(self, plan: StepPlan) -> None:
        for slot, incarnation in plan.drops:
            state = self.states.pop(slot, None)
            if state is None or state.incarnation != incarnation:
                raise InvariantBroken(f"step {plan.step} drops {slot}.{incarnation}, which is not there", invariant=32)
        for new in plan.new:
            if new.slot in self.states:
                raise InvariantBroken(f"step {plan.step} puts a sequence into the taken slot {new.slot}", invariant=25)
            client = self._client_of(new.slot, new.incarnation)
            self.states[new.slot] = SimulatedSlot(new, client, plan.sampling[new.sampling], self.weights)
        for slot, block in plan.grown:
            self.states[slot].table.append(block)
        for slot, place, block in plan.deduplicated:
            self.states[slot].table[place] = block

    def _row(self, plan: StepPlan, slot: int, state: SimulatedSlot, count: int) -> tuple[int, ...]:
        """Compute `count` tokens of one sequence; sample if that reaches the end of its known tokens."""
        outputs = len(state.tokens) - state.prompt_tokens
        if state.client.poison_at == outputs:
            raise WorkerDied(state.client)
        if state.failed or state.client.nan_at == outputs:
            state.failed = True
            return ()
        begin = state.computed
        if begin + count > len(state.tokens):
            raise InvariantBroken(f"step {plan.step}: slot {slot} is to run {count} tokens past {begin}", invariant=30)
        for position in range(begin, begin + count):
            self._write(state, position, state.compute(state.tokens[position]))
        context = self._context(plan, slot, state)
        return () if state.computed < len(state.tokens) else (_sampled(state, context),)

    def _verify(self, plan: StepPlan, slot: int, state: SimulatedSlot, most: int) -> tuple[int, list[TokenLogprob]]:
        """Draft up to `most` tokens behind the sampled one, of which any number is true. Returns how many were drafted, and the
        tokens beside the first. KV of every draft is written, also behind the first that is refused."""
        drafts = int(noise(self._seed, plan.step * 31 + slot) * (most + 1))
        taken: list[TokenLogprob] = []
        tag, true = state.tag, True
        for place in range(drafts):
            position, token = state.computed + (0 if true else place - len(taken)), state.tokens[-1]
            if position >= len(state.table) * self._size:
                raise InvariantBroken(f"step {plan.step}: slot {slot} has no block for position {position}", invariant=6)
            draft = token
            if noise(self._seed, plan.step * 1009 + slot * 31 + place) >= self._draft_truth:
                draft = (token + 1) % state.client.vocab
            ill = len(state.tokens) - state.prompt_tokens in (state.client.nan_at, state.client.poison_at)
            true = true and draft == token and not ill
            if true:
                self._write(state, position, state.compute(token))
                tag = state.tag
                taken.append(_with_logprob(state, _sampled(state, self._context(plan, slot, state))))
            else:
                tag = next_tag(tag, draft + 1)
                self._write(state, position, tag_bytes(tag))
        return drafts, taken

    def _write(self, state: SimulatedSlot, position: int, tag: bytes) -> None:
        offset = position % self._size * TAG_BYTES
        self.pool[state.table[position // self._size]][offset : offset + TAG_BYTES] = tag

    def _context(self, plan: StepPlan, slot: int, state: SimulatedSlot) -> bytes:
        """The content that the sequence attends to, through its table."""
        context = b"".join([self.pool[block] for block in state.table])[: state.computed * TAG_BYTES]
        if context != state.expected:
            raise InvariantBroken(f"step {plan.step}: slot {slot} reads foreign KV (request {state.client.id})", invariant=12)
        return context


def _sampled(state: SimulatedSlot, context: bytes) -> int:
    token = draw(crc32(context), state.sampling.seed, state.index, state.computed, state.client.vocab)
    state.tokens.append(token)
    return token


def _with_logprob(state: SimulatedSlot, token: int) -> TokenLogprob:
    return TokenLogprob(token, logprob(state.tag, token), 1)


def _row_logprobs(
    slot: Slot, state: SimulatedSlot, tag: int, begin: int, after: int, end: int, values: tuple[int, ...]
) -> RowLogprobs | None:
    """Log-probabilities of the sampled token, and of the prompt's tokens after those computed from position `begin`, tag
    `tag`, to position `end`, tag `after`."""
    sampled = None
    if values and state.sampling.logprobs is not None:
        sampled = TokenLogprob(values[0], logprob(after, values[0]), 1)
    prompt: list[TokenLogprob] = []
    if state.sampling.prompt_logprobs is not None:
        for position in range(begin, min(end, state.prompt_tokens - 1)):
            tag, token = next_tag(tag, state.tokens[position]), state.tokens[position + 1]
            prompt.append(TokenLogprob(token, logprob(tag, token), 1))
    if sampled is None and not prompt:
        return None
    return RowLogprobs(slot, state.incarnation, sampled, begin + 1 if prompt else 0, tuple(prompt))
