"""Sampling settings of a step's sequences, in the order of the flat batch: the executor's second input."""

from __future__ import annotations

from collections.abc import Iterator

from baton.worker.arrays import Int64s
from baton.worker.draws import Draws
from baton.worker.flat_batch import FlatBatch
from baton.worker.input_batch import InputBatch
from baton.worker.pooling import PromptPart, prompt_parts
from baton.worker.sampling_columns import SamplingColumns
from baton.worker.sampling_state import SequenceSampling


class SamplingBatch:
    """Shared by all steps with the same sequences."""

    __slots__ = (
        *("asks_prompts", "columns", "constrained", "draws", "excludes", "excludes_beside_grammars", "forces", "on_host"),
        *("plain", "pools", "sequences", "slots", "states", "tallied", "token_logprobs"),
    )

    def __init__(self, slots: Int64s, columns: SamplingColumns, sequences: InputBatch) -> None:
        """`slots`: the occupied slots of the step's sequences."""
        self.slots = slots
        self.columns = columns
        self.sequences = sequences
        "State of each slot, for code that reads tokens."
        self.states: list[SequenceSampling] = [state for slot in slots.tolist() if (state := columns.states[slot]) is not None]
        self.plain = all(state.plain for state in self.states)
        "Whether all sequences are greedy, except for excluded tokens."
        self.draws = any(state.params.temperature > 0.0 for state in self.states)
        "Whether some sequence is sampled at random."
        self.excludes_beside_grammars = any(state.excluded for state in self.states)
        self.excludes = self.excludes_beside_grammars or any(state.grammar is not None for state in self.states)
        self.forces = any(state.thought is not None for state in self.states)
        "Whether some sequence may have no choice (thought.py)."
        self.pools = [(place, state.pool) for place, state in enumerate(self.states) if state.pool is not None]
        self.asks_prompts = any(state.params.prompt_logprobs is not None for state in self.states)
        self.token_logprobs = any(state.params.logprobs is not None for state in self.states)
        "Whether some sequence requests log-probabilities of sampled tokens."
        self.on_host = any(state.on_host for state in self.states)
        self.constrained = [(place, state.grammar) for place, state in enumerate(self.states) if state.grammar is not None]
        "Sequences with a grammar, by batch index."
        self.tallied = [(place, state) for place, state in enumerate(self.states) if state.tally is not None]

    def prompt_parts(self, batch: FlatBatch) -> Iterator[PromptPart]:
        """The parts of pooled prompts that a step computes."""
        return prompt_parts(batch, self.pools, self.slots, self.sequences)

    def draws_of(self, slots: Int64s, ahead: int = 0) -> Draws:
        """Draw settings of the next token of these slots, or of the one that many tokens later."""
        return self.columns.draws_at(slots, self.sequences.output_counts(slots) + ahead)
