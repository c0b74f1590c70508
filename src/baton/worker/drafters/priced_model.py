"""A draft model (model.py) together with its price (model_price.py): drafts are computed only where they are expected to
pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.protocol.progress import ProgressWord
from baton.worker.drafters.model import ModelDrafter
from baton.worker.drafters.model_price import INTERVAL_MAX, READY_ROWS, ModelPrice
from baton.worker.drafters.passes import UNBOUNDED
from baton.worker.drafters.price import DraftPrice
from baton.worker.input_batch import InputBatch


class PricedModel:
    def __init__(self, drafter: ModelDrafter, price: DraftPrice | None) -> None:
        """`price`: predicts the seconds of a step. None: all drafts run."""
        self._drafter = drafter
        self._price = None if price is None else ModelPrice(price.seconds)
        self._guesses: dict[int, tuple[int, int]] = {}
        "The draft of each slot that was not run: its position and its token."
        self._interval = self._pause = 0
        "Number of steps without drafts after a step in which none paid, and how many of them are left."
        self.continues = False
        "Whether the last call of `drafts` computed something, and the next step is to continue with it."
        drafter.passed = self._passed

    def prepare(self) -> None:
        """Does everything that would slow down the first draft."""
        self._drafter.prepare()

    def assign_slot(self, slot: int) -> None:
        """Forget the slot's earlier sequence: it has another one now."""
        self._drafter.assign_slot(slot)
        self._guesses.pop(slot, None)
        if self._price is not None:
            self._price.assign_slot(slot)

    def drafts(
        self,
        sequences: int,
        rows: int,
        most: Mapping[int, int],
        batch: InputBatch,
        *,
        room: int = UNBOUNDED,
        waiting: float | None = 0.0,
    ) -> dict[int, list[int]]:
        """Return draft tokens by slot. `sequences`, `rows`: of the step, without these drafts. `most`: maximum of drafts for
        each slot that has none of another drafter; `room`: of all together. `waiting`: extra seconds of the step because it
        waits for the tokens before it; None: not measured."""
        self.continues = False
        if self._price is None:
            return self._drafter.propose_all(_within(room, most), batch)
        if self._pause or waiting is None:
            return {}
        self._learn_from_unused(self._price, batch)
        self._price.waiting = waiting
        return self._paying_drafts(self._price, sequences, rows, self._drafter.rooms(most, batch), batch, room)

    def verified(self, sequences: int, drafted: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        """Learn from verified drafts. `sequences`: in the step. `drafted`, `accepted`: number of drafts, and of right ones, by
        slot."""
        if self._price is None or not drafted:
            return
        for slot, count in drafted.items():
            self._price.accepted(slot, count, accepted.get(slot, 0))
        self._price.saved(sequences, sum(drafted.values()), sum(accepted.values()))

    def stepped(self, seconds: float) -> None:
        """Record the seconds of a step of the main model without prompts."""
        self._pause = max(0, self._pause - 1)
        if self._price is not None:
            self._price.stepped(seconds)

    def call_before_waits(self, call: Callable[[], None]) -> None:
        """Sets a function that is called before drafts are waited for."""
        self._drafter.meanwhile = call

    def report_progress(self, word: ProgressWord) -> None:
        self._drafter.report_progress(word)

    def close(self) -> None:
        self._drafter.close()

    def _paying_drafts(
        self, price: ModelPrice, sequences: int, rows: int, most: Mapping[int, int], batch: InputBatch, room: int
    ) -> dict[int, list[int]]:
        drafter, guesses = self._drafter, self._guesses
        lacking = {slot: drafter.behind(slot, batch) for slot in most}
        ready = {slot: count for slot, count in lacking.items() if count <= READY_ROWS}
        chosen = price.choose(sequences, rows, ready, most, room)
        wanted, more = dict(chosen), price.catch_up_rows(sequences)
        if more:
            others = [slot for _, slot in sorted((count, slot) for slot, count in lacking.items() if slot not in chosen)]
            if chosen:
                others = [slot for slot in others if slot not in ready]
            elif not price.knows_share or not self._all_would_pay(price, sequences, rows, most, room):
                others = others[:1]  # its draft is only compared, not run
            wanted |= dict.fromkeys(others, 1)
        if wanted:
            price.spent(price.waiting)
        found = drafter.propose_all(wanted, batch, sum(lacking[slot] for slot in chosen) + more) if wanted else {}
        guesses |= {slot: (int(batch.lengths[slot]), found[slot][0]) for slot in found.keys() - chosen.keys()}
        # Continue at once if a prompt is still being computed, or drafts are expected to pay once all sequences are ready.
        goes_on = bool(wanted) and (not found or self._all_would_pay(price, sequences, rows, most, room))
        self.continues = bool(chosen) or goes_on
        self._interval = 0 if self.continues else min(INTERVAL_MAX, 2 * self._interval + 1)
        self._pause = self._interval
        if self._interval == INTERVAL_MAX:
            price.found_nothing()
        return {slot: found[slot] for slot in chosen if slot in found}

    def _all_would_pay(self, price: ModelPrice, sequences: int, rows: int, most: Mapping[int, int], room: int) -> bool:
        """Whether drafts would pay if all sequences were ready. A round costs little more for several sequences than for one,
        so the drafts of a few that are ready may not pay alone."""
        return bool(price.choose(sequences, rows, dict.fromkeys(most, 1), most, room))

    def _learn_from_unused(self, price: ModelPrice, batch: InputBatch) -> None:
        """Learn from drafts that were not run, once the token at their position is known."""
        for slot, (position, token) in list(self._guesses.items()):
            if position < batch.lengths[slot]:
                price.accepted(slot, 1, int(batch.tokens[slot, position] == token))
                del self._guesses[slot]

    def _passed(self, rows: int, seconds: float) -> None:
        if self._price is not None:
            self._price.passes.measured(rows, seconds)
            self._price.spent(seconds)


def _within(room: int, drafts: Mapping[int, int]) -> dict[int, int]:
    """The numbers of drafts by slot, lowered to `room` in all; slots that get none are left out."""
    lowered: dict[int, int] = {}
    for slot, count in drafts.items():
        if taken := min(count, room):
            lowered[slot] = taken
            room -= taken
    return lowered
