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


class Seat:
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
        self.seats: dict[int, Seat] = {}
        self.pool = [bytearray(TAG_BYTES * block_size) for _ in range(blocks)]

    def die(self, pool_kept: bool) -> None:
        self.seats.clear()
        if not pool_kept:
            # Other memory, with junk in it: reading it is detected. Processes that map the old one still have it.
            self.pool = [bytearray(bytes([0xA5 ^ number & 0xFF]) * len(block)) for number, block in enumerate(self.pool)]

    def scribble(self) -> None:
        for number, block in enumerate(self.pool):
            block[:] = bytes([0xC3 ^ number & 0xFF]) * len(block)

    def execute(self, plan: StepPlan, die_after: int | None = None) -> StepResult:
        """`die_after`: the process dies when it has computed that many rows."""
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
            seat = self.seats[slot]
            tag, begin = seat.tag, seat.computed
            sampled = self._row(plan, slot, seat, count)
            after, end = seat.tag, seat.computed
            more: list[TokenLogprob] = []
            if drafted and plan.run.drafts[number] and sampled:
                drafted[number], more = self._verify(plan, slot, seat, plan.run.drafts[number])
            incarnations.append(seat.incarnation)
            lengths.append(len(sampled) + len(more))
            values += sampled
            values += [each.token for each in more]
            if seat.failed:
                failures.append(RowFailure(slot, seat.incarnation, "NaN in the logits"))
            elif seat.asks and (row := _row_logprobs(slot, seat, tag, begin, after, end, sampled)) is not None:
                logprobs.append(row)
                logprobs += [RowLogprobs(slot, seat.incarnation, each) for each in more]
        for _, incarnation in plan.drops:
            incarnations.append(incarnation)
            lengths.append(1)
            values.append(PREEMPTED_TOKEN_ID)
        columns = (plan.rows, tuple(incarnations), tuple(lengths), tuple(values))
        return StepResult(plan.step, plan.epoch, *columns, tuple(failures), tuple(logprobs), tuple(drafted))

    def _take_in(self, plan: StepPlan) -> None:
        for slot, incarnation in plan.drops:
            seat = self.seats.pop(slot, None)
            if seat is None or seat.incarnation != incarnation:
                raise InvariantBroken(f"step {plan.step} drops {slot}.{incarnation}, which is not there", invariant=32)
        for new in plan.new:
            if new.slot in self.seats:
                raise InvariantBroken(f"step {plan.step} seats a sequence in a taken slot {new.slot}", invariant=25)
            client = self._client_of(new.slot, new.incarnation)
            self.seats[new.slot] = Seat(new, client, plan.sampling[new.sampling], self.weights)
        for slot, block in plan.grown:
            self.seats[slot].table.append(block)
        for slot, place, block in plan.deduplicated:
            self.seats[slot].table[place] = block

    def _row(self, plan: StepPlan, slot: int, seat: Seat, count: int) -> tuple[int, ...]:
        """Compute `count` tokens of one sequence; sample if that reaches the end of its known tokens."""
        outputs = len(seat.tokens) - seat.prompt_tokens
        if seat.client.poison_at == outputs:
            raise WorkerDied(seat.client)
        if seat.failed or seat.client.nan_at == outputs:
            seat.failed = True
            return ()
        begin = seat.computed
        if begin + count > len(seat.tokens):
            raise InvariantBroken(f"step {plan.step}: slot {slot} is to run {count} tokens past {begin}", invariant=30)
        for position in range(begin, begin + count):
            self._write(seat, position, seat.compute(seat.tokens[position]))
        context = self._context(plan, slot, seat)
        return () if seat.computed < len(seat.tokens) else (_sampled(seat, context),)

    def _verify(self, plan: StepPlan, slot: int, seat: Seat, most: int) -> tuple[int, list[TokenLogprob]]:
        """Draft up to `most` tokens behind the sampled one, of which any number is true. Returns how many were drafted, and the
        tokens beside the first. KV of every draft is written, also behind the first that is refused."""
        drafts = int(noise(self._seed, plan.step * 31 + slot) * (most + 1))
        taken: list[TokenLogprob] = []
        tag, true = seat.tag, True
        for place in range(drafts):
            position, token = seat.computed + (0 if true else place - len(taken)), seat.tokens[-1]
            if position >= len(seat.table) * self._size:
                raise InvariantBroken(f"step {plan.step}: slot {slot} has no block for position {position}", invariant=6)
            draft = token
            if noise(self._seed, plan.step * 1009 + slot * 31 + place) >= self._draft_truth:
                draft = (token + 1) % seat.client.vocab
            ill = len(seat.tokens) - seat.prompt_tokens in (seat.client.nan_at, seat.client.poison_at)
            true = true and draft == token and not ill
            if true:
                self._write(seat, position, seat.compute(token))
                tag = seat.tag
                taken.append(_told(seat, _sampled(seat, self._context(plan, slot, seat))))
            else:
                tag = next_tag(tag, draft + 1)
                self._write(seat, position, tag_bytes(tag))
        return drafts, taken

    def _write(self, seat: Seat, position: int, tag: bytes) -> None:
        offset = position % self._size * TAG_BYTES
        self.pool[seat.table[position // self._size]][offset : offset + TAG_BYTES] = tag

    def _context(self, plan: StepPlan, slot: int, seat: Seat) -> bytes:
        """Everything that the sequence attends to, through its table."""
        context = b"".join([self.pool[block] for block in seat.table])[: seat.computed * TAG_BYTES]
        if context != seat.expected:
            raise InvariantBroken(f"step {plan.step}: slot {slot} reads foreign KV (request {seat.client.id})", invariant=12)
        return context


def _sampled(seat: Seat, context: bytes) -> int:
    token = draw(crc32(context), seat.sampling.seed, seat.index, seat.computed, seat.client.vocab)
    seat.tokens.append(token)
    return token


def _told(seat: Seat, token: int) -> TokenLogprob:
    return TokenLogprob(token, logprob(seat.tag, token), 1)


def _row_logprobs(
    slot: Slot, seat: Seat, tag: int, begin: int, after: int, end: int, values: tuple[int, ...]
) -> RowLogprobs | None:
    """Log-probabilities of the sampled token, and of the prompt's tokens after those computed from position `begin`, tag
    `tag`, to position `end`, tag `after`."""
    sampled = None
    if values and seat.sampling.logprobs is not None:
        sampled = TokenLogprob(values[0], logprob(after, values[0]), 1)
    prompt: list[TokenLogprob] = []
    if seat.sampling.prompt_logprobs is not None:
        for position in range(begin, min(end, seat.prompt_tokens - 1)):
            tag, token = next_tag(tag, seat.tokens[position]), seat.tokens[position + 1]
            prompt.append(TokenLogprob(token, logprob(tag, token), 1))
    if sampled is None and not prompt:
        return None
    return RowLogprobs(slot, seat.incarnation, sampled, begin + 1 if prompt else 0, tuple(prompt))
