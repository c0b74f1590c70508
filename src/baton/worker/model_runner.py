"""Runs plans on a model, by `submit` and `collect`; the files beside it do the work.

    submit(plan)   plan -> slots -> flat batch -> launch      returns the InFlightStep
    collect(it)    tokens -> slots -> result                  in the order of the plans

Up to executor.steps_ahead steps may be submitted and not collected. So a plan's changes (slots, tables, lengths) are applied at
once, and the values of tokens come later.

A plan that must wait for tokens (must_wait) finds the device idle, so little is left to do between these tokens and its launch:

    apply(plan)    its changes -> slots, device     while earlier steps run
    finish(it)     tokens -> slots                  then the plan is submitted, and the results of finished steps are built

A sequence that fails (NaN, an invalid token id) fails alone: it gives no token and a RowFailure, in every step that runs it,
until it is dropped; also in steps that were launched before. A plan that contradicts this state raises ProtocolError, after
which the worker's state is invalid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np
from msgspec import structs

from baton.errors import InvalidConfig, InvariantBroken, ProtocolError
from baton.kvpool.base import Pool
from baton.protocol.progress import ProgressWord
from baton.protocol.request import SamplingParams
from baton.protocol.step import BatchRows, NewSequence, StepPlan, StepResult
from baton.worker.drafters.base import Drafter, expected_of
from baton.worker.drafters.model import ModelDrafter
from baton.worker.drafters.price import DraftPrice
from baton.worker.drafters.priced_model import PricedModel
from baton.worker.executors.base import Executor
from baton.worker.failure import Failure, off_grammar
from baton.worker.grammar_masks import GrammarMasks
from baton.worker.in_flight_step import BatchMembers, InFlightStep
from baton.worker.input_batch import InputBatch
from baton.worker.kv_layout import kv_layout
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.sampling_state import BANS_MAX, BadWords, SequenceSampling, sampled_on_host, waits_for_tokens

HARMLESS = SamplingParams()
"""Settings of a sequence that failed before it ran: its own settings must not reach the rows of others."""


class ModelRunner:
    def __init__(
        self,
        executor: Executor,
        pool: Pool,
        *,
        slots: int,
        grammars: GrammarMasks | None = None,
        drafter: Drafter | None = None,
        draft_model: ModelDrafter | None = None,
        price: DraftPrice | None = None,
    ) -> None:
        """`pool`: the pool that `executor` is bound to. Both are closed with the runner, and so are `grammars` and
        `draft_model`, which drafts where `drafter` has nothing. `price`: decides how many drafts run; None: all."""
        layout = pool.layout
        if layout != kv_layout(executor.config, layout.block_size, layout.kind):
            raise ProtocolError(f"{layout} is not what a pool of this model looks like")
        self.config = executor.config
        self.executor = executor
        self.steps_ahead = executor.steps_ahead
        self.pool = pool
        self.grammars = grammars or GrammarMasks(None)
        self.grammars.drafts = drafter is not None
        if drafter is not None and not executor.draft_rows_max:
            raise InvalidConfig(f"--speculate: {executor.name} does not verify drafts: leave it out")
        self.drafter = drafter
        self._price = price
        self._draft_model = None if draft_model is None else PricedModel(draft_model, price)
        self._slots = slots
        self._advance: Callable[[], None] = lambda: None
        self._in_flight: deque[InFlightStep] = deque()
        "Steps that are submitted and not collected, oldest first."
        self._collected_at = 0.0
        self.clear()

    @property
    def _drafting(self) -> list[Drafter | DraftPrice]:
        """Objects with a state per slot, for drafts."""
        return [each for each in (self.drafter, self._price) if each is not None]

    @property
    def _drafts_at_all(self) -> bool:
        return self.drafter is not None or self._draft_model is not None

    def prepare(self) -> None:
        """Does everything that would slow down the first step."""
        self.executor.prepare()
        if self._draft_model is not None:
            self._draft_model.prepare()

    def clear(self) -> None:
        """Empties every slot, as at the start. Data in the pool stays, but no slot refers to it."""
        while self._in_flight:
            in_flight = self._in_flight.popleft()
            if in_flight.launched is not None:
                self.executor.collect(in_flight.launched)
        self.batch = InputBatch(slots=self._slots, blocks=self.pool.blocks, block_size=self.pool.layout.block_size)
        self.sampling = SamplingColumns(self._slots)
        self._failed: dict[int, Failure] = {}
        "Slots with a failure, which their results report until they are dropped."
        self._last_step: int | None = None
        self._applied: int | None = None
        "Step of the plan that was applied early and is not submitted yet."
        self._last_members: BatchMembers | None = None
        "Members of the last step, while they are valid."

    def report_progress(self, word: ProgressWord) -> None:
        """Sets the word to advance from now on: per layer, and at every phase of a step."""
        self._advance = word.advance
        self.grammars.report_progress(word)
        self.executor.report_progress(word)
        if self._draft_model is not None:
            self._draft_model.report_progress(word)

    def call_before_waits(self, call: Callable[[], None]) -> None:
        """Sets a function that `submit` calls before it waits long for something other than the tokens of earlier steps: for a
        mask, or for the draft model."""
        self.grammars.before_wait = call
        if self._draft_model is not None:
            self._draft_model.call_before_waits(call)

    def must_wait(self, plan: StepPlan) -> bool:
        """Whether all earlier steps must be collected before this one is submitted: steps_ahead is reached, a sequence is
        sampled on the host, which needs the tokens so far, or drafts are in flight or wanted, which need them too."""
        if not self._in_flight:
            return False
        if len(self._in_flight) >= self.steps_ahead:
            return True
        on_host = self.executor.samples_on_host
        if any(one.drafted for one in self._in_flight):
            return True
        if plan.run.drafts and self._drafts_at_all and (self._price is None or self._price.worth_waiting(plan.step)):
            return True
        if any((sampled_on_host if on_host else waits_for_tokens)(params) for params in plan.sampling):
            return True
        return self._needs_tokens(plan.run)

    def _needs_tokens(self, run: BatchRows) -> bool:
        """Whether a sequence in its slot needs its tokens so far before its next step is launched, with or without drafts."""
        column = self.sampling.on_host if self.executor.samples_on_host else self.sampling.waits
        return bool(column[list(run.slots)].any())

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan that must wait, except for its tokens, while earlier steps run. It is the next one to be submitted.
        One with new or dropped sequences is left to `submit`: running drafts still belong to the slots' occupants."""
        if self._applied != plan.step and not (plan.new or plan.drops):
            self._apply_plan(plan)
            self._applied = plan.step
            self.executor.send_tables(self._members(plan.run).sampling.sequences)

    def submit(self, plan: StepPlan) -> InFlightStep:
        """Applies the plan and launches its step. `collect` returns the result later, in the order of the plans."""
        if len(self._in_flight) >= self.steps_ahead:
            raise InvariantBroken(f"step {plan.step} is submitted while {len(self._in_flight)} are under way")
        self._advance()
        if self._applied != plan.step:
            self._apply_plan(plan)
        self._applied = None
        in_flight = InFlightStep(plan, self._members(plan.run))
        layout, sampling = in_flight.members.layout, in_flight.members.sampling
        if sampling.states:
            in_flight.needs_tokens = self._price is not None and self.steps_ahead > 1 and self._needs_tokens(plan.run)
            drafts = self._drafts(in_flight) if plan.run.drafts and not self._in_flight else {}
            flat = self.batch.flatten_drafted(layout, drafts) if drafts else self.batch.flatten(layout)
            in_flight.began = perf_counter()
            in_flight.launched = self.executor.launch(flat, sampling)
            # From here on the device computes.
            in_flight.rows, in_flight.due = len(flat.token_ids), None if flat.due.all() else np.flatnonzero(flat.due)
            in_flight.waited = self._price is not None and self._price.has_waited(plan.step)
            in_flight.places = self.batch.advance(layout, in_flight.of_due(layout.slots))
        self._in_flight.append(in_flight)
        return in_flight

    def collect(self, in_flight: InFlightStep) -> StepResult:
        self.finish(in_flight)
        return in_flight.result()

    def finish(self, in_flight: InFlightStep) -> None:
        """Waits for the oldest step and stores its tokens. Its result may be built later, after the next launch."""
        if not self._in_flight or self._in_flight[0] is not in_flight:
            raise InvariantBroken(f"step {in_flight.plan.step} is collected out of order")
        if in_flight.launched is not None:
            in_flight.sampled = self.executor.collect(in_flight.launched)
        self._in_flight.popleft()
        self._measure(in_flight)
        self._learn(in_flight)

    def execute(self, plan: StepPlan) -> StepResult:
        """Submits and collects one step, without overlap."""
        return self.collect(self.submit(plan))

    def close(self) -> None:
        """Releases the pool: nothing can be run afterwards."""
        self.grammars.close()
        if self._draft_model is not None:
            self._draft_model.close()
        self.executor.close()
        self.pool.close()

    # The plan

    def _apply_plan(self, plan: StepPlan) -> None:
        """Applies drops, new sequences and table changes of a plan to the slots. Raises ProtocolError if they contradict the
        state."""
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise ProtocolError(f"step {plan.step} follows step {self._last_step}: a plan was lost or came twice")
        self._last_step = plan.step
        if any(new.adapter for new in plan.new):
            raise ProtocolError(f"step {plan.step} has an adapter, which this worker does not compute")
        if plan.drops or plan.new:
            self._last_members = None
        for slot, incarnation in plan.drops:
            self.batch.drop(slot, incarnation)
            self.sampling.drop(slot)
            for each in self._drafting:
                each.drop(slot)
            self._failed.pop(slot, None)
        # By row of the settings: sequences of one request share them, and the lists may hold thousands of tokens.
        bad_words: dict[int, BadWords | None] = {}
        for new in plan.new:
            if not 0 <= new.sampling < len(plan.sampling):
                raise ProtocolError(f"slot {new.slot} has settings {new.sampling}; the plan has {len(plan.sampling)}")
            made = self._assign_slot(new, plan.sampling[new.sampling], bad_words.get(new.sampling))
            bad_words[new.sampling] = made.bad_words
        for slot, block in plan.grown:
            self.batch.grow(slot, block)
        for slot, place, block in plan.deduplicated:
            self.batch.fold(slot, place, block)

    def _assign_slot(self, new: NewSequence, sampling: SamplingParams, bad_words: BadWords | None) -> SequenceSampling:
        """Fills the slot with a new sequence, and builds its sampling state. An invalid sequence gets harmless settings and
        fails alone."""
        vocabulary = self.config.vocab_size
        outside = "" if 0 <= min(new.tokens) <= max(new.tokens) < vocabulary else "prompt"
        if max(sampling.label_ids, default=0) >= vocabulary:
            outside = "labels"
        if outside:
            self._fail(new.slot, Failure(f"a token id of the {outside} is outside the vocabulary of {vocabulary}"))
            new, sampling, bad_words = structs.replace(new, tokens=(0,) * len(new.tokens)), HARMLESS, None
        self.batch.assign_slot(new)
        prompt, outputs = new.tokens[: new.prompt_tokens], new.tokens[new.prompt_tokens :]
        grammar = self.grammars.assign_slot(sampling, outputs)
        for each in self._drafting:
            each.assign_slot(new.slot, grammar)
        if self._draft_model is not None:
            self._draft_model.assign_slot(new.slot)
        made = SequenceSampling(sampling, new.index, vocabulary, prompt, outputs, bad_words, grammar)
        if made.bans_max > BANS_MAX:
            words = f"bad_words and min_tokens exclude {made.bans_max} tokens at a time, and at most {BANS_MAX} are allowed"
            self._fail(new.slot, Failure(words))
            made = SequenceSampling(HARMLESS, new.index, vocabulary, prompt, outputs)
        self.sampling.assign_slot(new.slot, made)
        return made

    def _fail(self, slot: int, failure: Failure) -> None:
        self._failed[slot] = failure
        self._last_members = None

    def _members(self, run: BatchRows) -> BatchMembers:
        """The members of a step: most steps run the sequences of the last one."""
        members = self._last_members
        if members is None or members.run.slots != run.slots or members.run.counts != run.counts:
            self.batch.check_run(run)
            members = self._last_members = BatchMembers(run, self.batch, self.sampling, self._failed)
        return members

    def _drafts(self, in_flight: InFlightStep) -> dict[int, Sequence[int]]:
        """Drafts by place in the layout, at most as many as the plan has room for. The values of all tokens are known
        (must_wait)."""
        run, slots, batch, drafter = in_flight.plan.run, in_flight.members.layout.listed, self.batch, self.drafter
        left = self.executor.draft_rows_max
        if len(run.drafts) != len(run.slots) or min(run.drafts) < 0:
            raise ProtocolError(f"step {in_flight.plan.step} has drafts for other rows than it runs")
        if not self._drafts_at_all:
            return {}
        price = self._price
        most: dict[int, int] = dict(zip(run.slots, run.drafts, strict=True))
        found: dict[int, Sequence[int]] = {}
        lengths = batch.lengths[in_flight.members.layout.slots].tolist()
        for place, slot in enumerate(slots):
            room = min(left, most[slot])
            if drafter is None or not room or (price is not None and not price.worth_asking(slot)):
                continue
            draft = drafter.propose(slot, batch.tokens[slot, : lengths[place]], room)
            if price is not None:
                price.proposed(slot, expected=expected_of(draft))
                price.asked(slot, found=bool(draft))
            if draft:
                found[place] = draft
                left -= len(draft)
        if price is not None:
            found = self._paying_drafts(price, in_flight, slots, found) if found else found
        if self._draft_model is not None:
            found |= self._modelled(self._draft_model, in_flight, slots, most, found)
        if price is not None:
            price.tried(found=bool(found) or (self._draft_model is not None and self._draft_model.continues))
        in_flight.drafted = {slots[place]: len(draft) for place, draft in found.items()}
        return found

    def _modelled(
        self,
        model: PricedModel,
        in_flight: InFlightStep,
        slots: list[int],
        most: Mapping[int, int],
        found: dict[int, Sequence[int]],
    ) -> dict[int, Sequence[int]]:
        """Drafts of the draft model, for sequences without others."""
        others = {slot: most[slot] for place, slot in enumerate(slots) if place not in found and most[slot]}
        if not others:
            return {}
        began, drafted = perf_counter(), sum(map(len, found.values()))
        room = self.executor.draft_rows_max - drafted
        # A step that waits for other reasons too has no further cost of waiting.
        waiting = 0.0 if self._price is None or found or in_flight.needs_tokens else self._price.waiting
        drafts = model.drafts(len(slots), len(slots) + drafted, others, self.batch, room=room, waiting=waiting)
        in_flight.modelled = {slot: len(draft) for slot, draft in drafts.items()}
        in_flight.drafting = perf_counter() - began
        return {slots.index(slot): draft for slot, draft in drafts.items()}

    def _paying_drafts(
        self, price: DraftPrice, in_flight: InFlightStep, slots: list[int], found: dict[int, Sequence[int]]
    ) -> dict[int, Sequence[int]]:
        """Drafts, shortened to those that are worth their rows. The price learns from the proposed drafts, run or not."""
        for place in found:
            price.known(slots[place], self.batch.tokens[slots[place], : self.batch.lengths[slots[place]]])
        drafts = {slots[place]: len(draft) for place, draft in found.items()}
        chosen = price.choose(len(slots), drafts, waits=not in_flight.needs_tokens)
        for place, draft in found.items():
            if slots[place] not in chosen:
                price.not_run(slots[place], int(self.batch.lengths[slots[place]]), draft[0])
        return {place: draft[: chosen[slots[place]]] for place, draft in found.items() if slots[place] in chosen}

    # Results of a step

    def _measure(self, in_flight: InFlightStep) -> None:
        """Teaches the prices of a step without prompts. If it waited for tokens, time counts from their arrival on, without the
        time of the draft model: the device is idle before. If it needs them even without drafts, the wait is not charged to
        drafts."""
        plan, before, now = in_flight.plan, self._collected_at + in_flight.drafting, perf_counter()
        self._collected_at = now
        if self._price is None and self._draft_model is None:
            return
        if not in_flight.rows or plan.new or max(plan.run.counts) > 1:
            return
        waited = in_flight.waited and not in_flight.needs_tokens
        seconds = now - (before if waited or in_flight.needs_tokens else max(before, in_flight.began))
        if self._price is not None:
            if waited and not in_flight.drafted:
                self._price.waited_for_nothing(in_flight.rows, seconds)
            else:
                self._price.measured(in_flight.rows, seconds, waited=waited)
        if self._draft_model is not None and (self._price is None or self._price.is_measured):
            self._draft_model.stepped(seconds)

    def _learn(self, in_flight: InFlightStep) -> None:
        """Stores the sampled tokens of a collected step in the slots, their sampling states and grammars; fails sequences
        without a token."""
        members, sampled = in_flight.members, in_flight.sampled
        for place, failure in sampled.failed.items():
            grammar = members.sampling.states[place].grammar
            if grammar is not None and grammar.error:
                failure = off_grammar(grammar.error) if grammar.ran_out else Failure(grammar.error)
            self._fail_late(in_flight, place, failure)
        slots, places, tokens = in_flight.of_due(members.layout.slots), in_flight.places, in_flight.of_due(sampled.tokens)
        if self._in_flight:  # later steps, whose plans may have assigned the slot again
            same = self.batch.incarnations[slots] == in_flight.of_due(members.sound_incarnations)
            slots, places, tokens = slots[same], places[same], tokens[same]
        self.batch.learn(slots, places, tokens)
        if in_flight.drafted:
            self._accept(in_flight)
        for place, state in members.sampling.tallied:
            if in_flight.got_token(place) and place not in sampled.consumed:
                state.sampled(int(sampled.tokens[place]))
        if members.sampling.constrained:
            ahead = [
                (grammar, int(sampled.tokens[at]))
                for at, grammar in members.sampling.constrained
                if in_flight.got_token(at) and at not in sampled.consumed
            ]
            if ahead:
                self.grammars.advance(ahead)

    def _accept(self, in_flight: InFlightStep) -> None:
        """Stores accepted drafts behind the known tokens. No later step is launched: its plan would have waited."""
        members, sampled = in_flight.members, in_flight.sampled
        slots, tokens, drafting = members.layout.listed, sampled.tokens.tolist(), self._drafting
        if sampled.accepted:
            places = range(len(slots)) if in_flight.due is None else in_flight.due.tolist()
            at = dict(zip(places, in_flight.places.tolist(), strict=True))
            self.batch.accept({slots[one]: (at[one], [*drafts, tokens[one]]) for one, drafts in sampled.accepted.items()})
        right: dict[int, int] = {}
        for place, slot in enumerate(slots):
            accepted = sampled.accepted.get(place, ())
            if slot in in_flight.modelled:
                right[slot] = len(accepted)
            elif slot in in_flight.drafted:
                for each in drafting:
                    each.accepted(slot, in_flight.drafted[slot], len(accepted))
        if self._draft_model is not None:
            self._draft_model.verified(len(members.layout.slots), in_flight.modelled, right)

    def _fail_late(self, in_flight: InFlightStep, place: int, failure: Failure) -> None:
        """Fails the sequence in all launched steps that run it."""
        slot, incarnation = int(in_flight.members.layout.slots[place]), int(in_flight.members.sound_incarnations[place])
        for one in (in_flight, *self._in_flight):
            if one.runs(slot, incarnation):
                one.failed.setdefault(slot, failure)
        if self.batch.incarnations[slot] == incarnation:
            self._fail(slot, failure)
