"""Sampling state of one sequence: its parameters, prepared once, and counts that grow token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.grammar.matcher import allows_only
from baton.protocol.request import SamplingParams
from baton.worker.arrays import Floats, Int32s
from baton.worker.draws import Ids
from baton.worker.flat_batch import FEEDBACK
from baton.worker.grammar_masks import GrammarState
from baton.worker.pooling import PromptPool
from baton.worker.thought import Thought

ANY = -1
"""Stands for any last token in a ban."""
NO_BANS: Int32s = np.zeros((0, 2), np.int32)
BANS_MAX = 4096
"""Maximum of bans per sequence and step. A GPU has room for this many per slot; the API allows fewer (api/limits.py)."""


class Tally:
    """The distinct tokens of a sequence and their counts in the output, for penalties; kept only if there are any."""

    __slots__ = ("_ids", "_outputs", "_place", "size")

    def __init__(self, prompt: Sequence[int], outputs: Sequence[int], vocab_size: int, *, with_prompt: bool) -> None:
        """Ids of `vocab_size` and above are ignored: on a GPU the counts of all sequences are adjacent in one table."""
        self._place: dict[int, int] = {}
        self._ids: Ids = np.zeros(16, np.int64)
        self._outputs: Floats = np.zeros(16, np.float32)
        self.size = 0
        if with_prompt:
            for token in dict.fromkeys(prompt):
                if 0 <= token < vocab_size:
                    self._find(token)
        for token in outputs:
            if 0 <= token < vocab_size:
                self.add(token)

    def add(self, token: int) -> None:
        place = self._find(token)  # first, because it may replace the arrays
        self._outputs[place] += 1

    def _find(self, token: int) -> int:
        place = self._place.get(token)
        if place is not None:
            return place
        place = self._place[token] = self.size
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._outputs = np.concatenate((self._outputs, np.zeros_like(self._outputs)))
        self._ids[place] = token
        self.size = place + 1
        return place

    @property
    def ids(self) -> Ids:
        return self._ids[: self.size]

    @property
    def outputs(self) -> Floats:
        """Count of each of `ids` in the output."""
        return self._outputs[: self.size]


class BadWords:
    """Single tokens are always forbidden; the last token of a longer word if the output ends with the rest of it."""

    __slots__ = ("_by_last", "_by_last_but_one", "_pairs", "always")

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        words = [word for word in words if word and word[-1] < vocab_size]
        self.always = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._pairs: Int32s = np.array([word for word in words if len(word) == 2], np.int32).reshape(-1, 2)
        self._by_last_but_one: dict[int, list[tuple[list[int], tuple[int, int]]]] = {}
        for word in words:
            if len(word) > 2:
                self._by_last_but_one.setdefault(word[-3], []).append((list(word[:-2]), (word[-2], word[-1])))

    @property
    def bans_max(self) -> int:
        """Maximum of bans per step."""
        return sum(map(len, self._by_last.values()))

    def ever(self) -> set[int]:
        """All tokens that may be forbidden at some point."""
        return {*self.always.tolist(), *(last for ends in self._by_last.values() for _, last in ends)}

    def forbidden(self, outputs: NDArray[np.int32]) -> Ids:
        if not self._by_last or not outputs.size:
            return self.always
        ends = self._by_last.get(int(outputs[-1]), ())
        now = [last for rest, last in ends if outputs[-len(rest) :].tolist() == rest]
        return np.concatenate((self.always, np.array(now, np.int64))) if now else self.always

    def bans(self, outputs: NDArray[np.int32]) -> Int32s:
        """(last token that activates the ban, forbidden token) of all but `always`. The last token may be FEEDBACK: then a word
        is matched without its last two, which are the ban."""
        if not outputs.size or not self._by_last:
            return NO_BANS
        if outputs[-1] != FEEDBACK:
            return _any_last(self.forbidden(outputs)[self.always.size :])
        known = outputs[:-1]
        ends = self._by_last_but_one.get(int(known[-1]), ()) if known.size else ()
        now = [pair for rest, pair in ends if known[-len(rest) :].tolist() == rest]
        return np.concatenate((self._pairs, np.array(now, np.int32))) if now else self._pairs


def _any_last(ids: Ids) -> Int32s:
    bans = np.full((ids.size, 2), ANY, np.int32)
    bans[:, 1] = ids
    return bans


class SequenceSampling:
    """Settings of one sequence. Ids outside the vocabulary are ignored: they could only affect a neighbour's row."""

    __slots__ = (
        *("adjusted", "bad_words", "bias_ids", "bias_values", "draw", "excluded", "grammar", "index", "on_host", "params"),
        *("plain", "pool", "seed", "stop_ids", "tally", "thought"),
    )

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        vocab_size: int,
        prompt: Sequence[int],
        outputs: Sequence[int],
        bad_words: BadWords | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """`bad_words`: those of `params`, if already built for another sequence. `grammar`: of `params`, with these outputs."""
        self.params = params
        self.grammar = grammar
        self.index = index
        self.pool = None if params.pooling is None else PromptPool(params.pooling, params.label_ids)
        self.seed = params.seed & 0xFFFFFFFFFFFFFFFF
        bias = {token: value for token, value in params.logit_bias if token < vocab_size}
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self.stop_ids = np.array([token for token in params.stop_token_ids if token < vocab_size], np.int64)
        self.bad_words = bad_words or (BadWords(params.bad_words, vocab_size) if params.bad_words else None)
        repeats = params.repetition_penalty != 1.0
        self.tally: Tally | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.tally = Tally(prompt, outputs, vocab_size, with_prompt=repeats)
        self.excluded = self.bad_words.ever() if self.bad_words is not None else set[int]()
        "Ids that are forbidden now or later."
        if params.min_tokens:
            self.excluded.update(self.stop_ids.tolist())
        rules = params.thinking
        limited = rules is not None and rules.budget is not None and rules.end < vocab_size
        self.thought = Thought(rules) if limited and rules is not None else None
        self.adjusted = bool(bias or self.tally or self.excluded or self.thought)
        "Whether the logits may be changed before a token is chosen from those that its grammar allows."
        top_k = min(params.top_k, vocab_size)  # the client may request any number
        self.draw = (0.0, params.top_p, params.min_p, params.temperature, top_k, self.adjusted, 0)
        "Settings as in draws.DRAW, without the uniform number."
        changed = bool(bias or self.tally or self.thought)
        self.plain = not (params.temperature > 0.0 or changed) and params.logprobs is None
        "Whether the sequence is greedy, except for tokens in `excluded` or forbidden by its grammar."
        self.on_host = sampled_on_host(params)

    def forbidden(self, outputs: NDArray[np.int32]) -> Ids:
        """Token ids that may not come next, besides those that its grammar forbids."""
        parts = []
        if self._keeps_going(outputs):
            parts.append(self.stop_ids)
        if self.bad_words is not None:
            parts.append(self.bad_words.forbidden(outputs))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def bans(self, outputs: NDArray[np.int32], mask: NDArray[np.uint32] | None = None) -> Int32s:
        """Forbidden tokens, as of forbidden(), without single bad words: [bans, 2], (last token that activates it or ANY,
        token). The last of `outputs` may be FEEDBACK. `mask`: what the grammar allows after these outputs, if that is not its
        present mask."""
        early = self.stop_ids.size and self._keeps_going(outputs, mask)
        bans = NO_BANS if self.bad_words is None else self.bad_words.bans(outputs)
        return np.concatenate((_any_last(self.stop_ids), bans)) if early else bans

    @property
    def bans_max(self) -> int:
        """Maximum of bans per step."""
        stops = self.stop_ids.size if self.params.min_tokens else 0
        return int(stops) + (0 if self.bad_words is None else self.bad_words.bans_max)

    def forced(self, outputs: NDArray[np.int32], *, drafts: bool = False) -> int | None:
        """The only allowed next token, if there is only one. `outputs` must not contain FEEDBACK. `drafts`: they end with
        some."""
        if self.thought is None:
            return None
        return self.thought.forced_behind(outputs) if drafts else self.thought.forced(outputs)

    def _keeps_going(self, outputs: NDArray[np.int32], mask: NDArray[np.uint32] | None = None) -> bool:
        """Whether no stop id may be drawn yet (min_tokens), unless the grammar allows nothing else."""
        if outputs.size >= self.params.min_tokens:
            return False
        return self.grammar is None or not allows_only(self.grammar.mask() if mask is None else mask, self.stop_ids)

    def sampled(self, token: int) -> None:
        if self.tally is not None:
            self.tally.add(token)

    def accept(self, token: int) -> None:
        """Consume an accepted draft before the next position of the same step is sampled."""
        self.sampled(token)
        if self.grammar is not None:
            self.grammar.consume(token)


def sampled_on_host(params: SamplingParams) -> bool:
    """Whether an executor that samples on the host needs the sequence's tokens so far before its next step is launched."""
    return bool(
        params.logit_bias
        or params.bad_words
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or waits_for_tokens(params)
    )


def waits_for_tokens(params: SamplingParams) -> bool:
    """Whether any executor needs the sequence's tokens so far before its next step is launched: they decide the allowed
    tokens."""
    limited = params.thinking is not None and params.thinking.budget is not None
    return limited or params.grammar is not None
