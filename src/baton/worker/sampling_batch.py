"""How the sequences of a step are sampled, in the order of the flat batch: what an executor is given besides the batch."""

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
    """The same object for all steps in which the same sequences run."""

    __slots__ = (
        *("asks_prompts", "columns", "constrained", "draws", "excludes", "on_host", "plain", "pools"),
        *("sequences", "slots", "states", "tallied", "tells"),
    )

    def __init__(self, slots: Int64s, columns: SamplingColumns, sequences: InputBatch) -> None:
        """`slots`: taken ones."""
        self.slots = slots
        self.columns = columns
        self.sequences = sequences
        "What is known of each slot: for who must look at tokens."
        self.states: list[SequenceSampling] = [state for slot in slots.tolist() if (state := columns.states[slot]) is not None]
        self.plain = all(state.plain for state in self.states)
        "The likeliest token is all that anybody wants, unless it is excluded."
        self.draws = any(state.params.temperature > 0.0 for state in self.states)
        "Somebody's token is left to chance."
        self.excludes = any(state.excluded or state.grammar is not None for state in self.states)
        self.pools = [(place, state.pool) for place, state in enumerate(self.states) if state.pool is not None]
        self.asks_prompts = any(state.params.prompt_logprobs is not None for state in self.states)
        self.tells = any(state.params.logprobs is not None for state in self.states)
        "Somebody wants log-probabilities of sampled tokens."
        self.on_host = any(state.on_host for state in self.states)
        self.constrained = [(place, state.grammar) for place, state in enumerate(self.states) if state.grammar is not None]
        "Those with a grammar."
        self.tallied = [(place, state) for place, state in enumerate(self.states) if state.tally is not None]

    def prompt_parts(self, batch: FlatBatch) -> Iterator[PromptPart]:
        """What a step computes of prompts that are pooled."""
        return prompt_parts(batch, self.pools, self.slots, self.sequences)

    def draws_of(self, slots: Int64s) -> Draws:
        """How the next token of these is drawn."""
        return self.columns.draws_at(slots, self.sequences.output_counts(slots))
