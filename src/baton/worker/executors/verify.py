"""Samples behind drafts: each position as without drafts, until a token differs from its draft.

    rows      t d1 d2 d3      logits of all rows come from one pass
    round 0   s1              sampled with the tokens so far
    round 1      s2           only if s1 = d1: penalties, bad words, grammar and draw as if d1 had been sampled, as it has
    round 2         s3        only if s2 = d2

A sequence's state consumes a token when it is sampled, and never a draft, so nothing is rolled back. A row that fails behind an
accepted draft ends the run: the next step begins with that position, and fails as a step without drafts would.

If all sequences are greedy and only grammars exclude tokens, there are no rounds: the tokens of all rows are chosen at once,
with the masks behind the drafts. Tokens behind a wrong draft are ignored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Floats, Int64s
from baton.worker.executors.base import Sampled
from baton.worker.flat_batch import FlatBatch
from baton.worker.forward.base import Forward
from baton.worker.sampler import Chosen, SampleRow, plain, sample
from baton.worker.sampling_batch import SamplingBatch
from baton.worker.token_masks import Masks, masks_of


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
        self._likeliest: Int64s | None = None
        "Token of each row, if they are chosen at once."
        if sampling.plain and not sampling.excludes_beside_grammars:
            self._likeliest = forward.likeliest(hidden[rows], self._masks())
        else:
            self._logits = forward.logits(hidden[rows])

    def _masks(self) -> Masks | None:
        """Masks of all rows of sequences with a grammar."""
        masks, vocabulary = dict[int, NDArray[np.uint32]](), self._forward.config.vocab_size
        for place, grammar in self._sampling.constrained:
            if (first := self._row_of.get(place)) is not None:
                drafts = self._guess[first + 1 : first + 1 + int(self._drafts[place])].tolist()
                masks.update(enumerate(grammar.masks_ahead(drafts, vocabulary), first))
        return masks_of(masks, np.arange(len(self._guess)))

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
        if self._likeliest is not None:
            self._compare(sampled, plain(self._likeliest))
            return
        places, ahead = self._places, 0
        while places.size:
            at = np.array([self._row_of[place] for place in places.tolist()]) + ahead
            chosen = self._sample(places, at, ahead)
            going = [
                self._accept(sampled, place, row, int(at[row]), chosen, ahead) for row, place in enumerate(places.tolist())
            ]
            places, ahead = places[going], ahead + 1

    def _compare(self, sampled: Sampled, chosen: Chosen) -> None:
        """Compare the drafts with the tokens of all rows."""
        guess, found = self._guess.tolist(), chosen.tokens.tolist()
        for place, first in self._row_of.items():
            if first in chosen.failed:
                sampled.failed[place] = chosen.failed[first]
                continue
            row, last = first, first + int(self._drafts[place])
            while row < last and guess[row + 1] == found[row] and row + 1 not in chosen.failed:
                row += 1
            if row > first:
                sampled.accepted[place] = found[first:row]
                if (grammar := self._sampling.states[place].grammar) is not None:
                    grammar.accept(found[first:row])
            sampled.tokens[place] = found[row]

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
