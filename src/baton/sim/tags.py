"""The tag machine that replaces the model.

In place of tensors each KV slot holds a 64-bit tag, `tag(pos) = H(tag(pos - 1), token)`, seeded by the weights and the
request's salt. Each step reads the tags of its whole context through its block table, and the next token is a pseudo-random
function of the tags read. So the right output of any request is known in closed form (`Oracle`), and any stale, foreign, torn
or misordered block changes it.
"""

from __future__ import annotations

from struct import Struct
from zlib import crc32

from baton.protocol.request import FinishReason, GenerateRequest

_MASK = (1 << 64) - 1
_TAG = Struct("<Q")
TAG_BYTES = _TAG.size


def identity_of(weights: int) -> bytes:
    """Identity of a worker with these weights."""
    return b"weights %d" % weights if weights else b""


def first_tag(salt: bytes, weights: int = 0) -> int:
    return crc32(salt, 0x5EED + weights) * 0x9E3779B97F4A7C15 & _MASK


def next_tag(tag: int, token: int) -> int:
    mixed = (tag ^ (token + 1) * 0xD6E8FEB86659FD93) * 0x9E3779B97F4A7C15 & _MASK
    return mixed ^ mixed >> 29


def tag_bytes(tag: int) -> bytes:
    return _TAG.pack(tag)


def draw(context_crc: int, seed: int, index: int, position: int, vocab: int) -> int:
    """The next token: a function of everything attended to, and of (seed, index, position), and of nothing else."""
    mixed = (context_crc ^ (seed * 31 + index) * 0x9E3779B1 ^ position * 0x85EBCA77) & _MASK
    mixed = mixed * 0xD6E8FEB86659FD93 & _MASK
    return (mixed >> 32) % vocab


def logprob(tag: int, token: int) -> float:
    """Log-probability of the token after a context: a number that identifies both."""
    return -((tag >> 20 ^ token * 0x9E3779B1) & 0xFFFF) / 4096.0


class Oracle:
    """The output of any correct engine for one sequence: no batching, no cache, no preemption. Computed on demand."""

    __slots__ = (
        "_crc",
        "_index",
        "_position",
        "_request",
        "_tag",
        "_vocab",
        "logprobs",
        "prompt_logprobs",
        "reason",
        "tags",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, index: int, vocab: int, weights: int = 0) -> None:
        self._request, self._index, self._vocab = request, index, vocab
        self.tokens: list[int] = []
        self.tags: list[int] = []
        "Tags of the prompt and of all output tokens but the last."
        self.reason: FinishReason | None = None
        "Whether the output is complete."
        self._tag = first_tag(request.salt, weights)
        self._crc = 0
        self._position = 0

    def _feed(self, token: int) -> None:
        self._tag = next_tag(self._tag, token)
        self._crc = crc32(_TAG.pack(self._tag), self._crc)
        self.tags.append(self._tag)
        self._position += 1

    def token(self, place: int) -> int | None:
        """Output token number `place`, or None if the output has ended by then."""
        while len(self.tokens) <= place and self.reason is None:
            self._next()
        return self.tokens[place] if place < len(self.tokens) else None

    def tag(self, position: int) -> int:
        """Tag of the token at this position of prompt and output together. The token must be drawn already."""
        if not self._position:
            self._begin()
        return self.tags[position]

    def logprob(self, position: int) -> float:
        """Log-probability of the token at this position, which must be known and not the first."""
        prompt = self._request.prompt
        token = prompt[position] if position < len(prompt) else self.tokens[position - len(prompt)]
        return logprob(self.tag(position - 1), token)

    def complete(self) -> list[int]:
        while self.reason is None:
            self._next()
        return self.tokens

    def _next(self) -> None:
        sampling = self._request.sampling
        if not self._position:
            self._begin()
        token = draw(self._crc, sampling.seed, self._index, self._position, self._vocab)
        self.tokens.append(token)
        if token in sampling.stop_token_ids and len(self.tokens) >= sampling.min_tokens:
            self.reason = FinishReason.STOP
        elif self._repeats():
            self.reason = FinishReason.REPETITION
        elif len(self.tokens) >= sampling.max_tokens:
            self.reason = FinishReason.LENGTH
        else:
            self._feed(token)

    def _repeats(self) -> bool:
        """Whether the output ends with a repetition, by its definition without a shortcut: the core finds the same end in
        another way."""
        rule, tokens = self._request.sampling.repetition_stop, self.tokens
        if rule is None or len(tokens) < self._request.sampling.min_tokens:
            return False
        for pattern in range(rule.pattern_min, rule.pattern_max + 1):
            needed = max(rule.count_min * pattern, rule.tokens_min)
            tail = tokens[-needed:]
            if len(tokens) >= needed and all(token == tail[place % pattern] for place, token in enumerate(tail)):
                return True
        return False

    def _begin(self) -> None:
        for token in self._request.prompt:
            self._feed(token)
