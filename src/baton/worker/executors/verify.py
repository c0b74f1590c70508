"""Samples behind drafts: each position as without drafts, until a token differs from its draft.

    rows      t d1 d2 d3      logits of all rows come from one pass
    round 0   s1              sampled with the tokens so far
    round 1      s2           only if s1 = d1: penalties, bad words, grammar and draw as if d1 had been sampled, as it has
    round 2         s3        only if s2 = d2

A sequence's state consumes a token when it is sampled, and never a draft, so nothing is rolled back. A row that fails behind an
accepted draft ends the run: the next step begins with that position, and fails as a step without drafts would.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.worker.arrays import Floats, Int64s
from baton.worker.executors.base import Sampled
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward
from baton.worker.sampler import Chosen, SampleRow, plain, sample
from baton.worker.sampling_batch import SamplingBatch

Choose = Callable[[Int64s, Int64s, int], Chosen]
"""Chooses tokens: (places, their rows of the logits, round) -> a token per place."""


class Verification:
    """One step with drafts."""

    def __init__(self, batch: FlatBatch, sampling: SamplingBatch, hidden: Floats, forward: Forward, places: Int64s) -> None:
        """`places`: batch indices of the due sequences that have not failed."""
        assert batch.drafts is not None
        self._sampling = sampling
        self._forward = forward
        self._drafts = batch.drafts
        self._places = places
        counts = 1 + batch.drafts[places]
        starts = np.cumsum(counts) - counts
        rows = np.repeat(batch.last_rows[places] - starts, counts) + np.arange(int(counts.sum()))
        self._row_of = dict(zip(places.tolist(), starts.tolist(), strict=True))
        "Row of each place's first logits."
        self._guess = batch.token_ids[rows]
        "Input token of each row: the first row of a place has a sampled token, the others have drafts."
        if sampling.plain and not sampling.excludes:
            likeliest = forward.likeliest(hidden[rows])
            self._choose: Choose = lambda _, at, __: plain(likeliest[at])
        else:
            self._logits = forward.logits(hidden[rows])
            self._choose = self._sample

    def _sample(self, places: Int64s, at: Int64s, ahead: int) -> Chosen:
        sampling, sequences = self._sampling, self._sampling.sequences
        slots = sampling.slots[places]
        rows = []
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            end = sequences.lengths[slot] + ahead  # accepted drafts lie behind the known tokens
            rows.append(SampleRow(sampling.states[place], sequences.tokens[slot, sequences.prompt_tokens[slot] : end]))
        return sample(self._logits[at], rows, sampling.draws_of(slots, ahead), self._forward.choose)

    def run(self, sampled: Sampled) -> None:
        """Verify the drafts, and add the results to `sampled`."""
        places, ahead = self._places, 0
        while places.size:
            at = np.array([self._row_of[place] for place in places.tolist()]) + ahead
            chosen = self._choose(places, at, ahead)
            going = [
                self._accept(sampled, place, row, int(at[row]), chosen, ahead) for row, place in enumerate(places.tolist())
            ]
            places, ahead = places[going], ahead + 1

    def _accept(self, sampled: Sampled, place: int, row: int, at: int, chosen: Chosen, ahead: int) -> bool:
        """Record the sampled token of one place. True: it equals the draft of the next row, which is then sampled next."""
        if row in chosen.failed:
            if ahead:
                sampled.consumed.add(place)
            else:
                sampled.failed[place] = chosen.failed[row]
            return False
        token, word = int(chosen.tokens[row]), chosen.logprobs.get(row)
        if ahead:  # the token before this one was an accepted draft
            sampled.accepted.setdefault(place, []).append(int(sampled.tokens[place]))
            if place in sampled.logprobs:
                sampled.accepted_logprobs.setdefault(place, []).append(sampled.logprobs[place])
        sampled.tokens[place] = token
        if word is not None:
            sampled.logprobs[place] = word
        if ahead == self._drafts[place] or self._guess[at + 1] != token:
            return False
        self._sampling.states[place].accept(token)
        return True
