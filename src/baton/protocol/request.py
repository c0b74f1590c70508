"""Requests of a front to an instance, and their ends. Token ids only: text never reaches an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct
from msgspec.structs import replace

from baton.protocol.grammar import Grammar, grammar_bytes
from baton.protocol.ids import RequestId
from baton.protocol.numbers import Counter
from baton.protocol.repetition import RepetitionStop
from baton.protocol.thinking import THINKING_BYTES_MAX, Thinking

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Extra = tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[bytes, Meta(min_length=1, max_length=64)]]
"""Input that is not tokens (an image, say): the position in the prompt where it begins, and its digest."""
TRACEPARENT_PATTERN: Final = "[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
"""Trace of a request as in W3C Trace Context: version, trace, parent, flags."""


Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stop conditions. A draw depends on (seed, sequence index, position) and nothing else."""

    max_tokens: Count = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    "Number of tokens before which no stop id ends the sequence."
    stop_token_ids: tuple[TokenId, ...] = ()
    "Ids that end the sequence. They include end-of-text tokens, unless the client asked to ignore them."
    repetition_stop: RepetitionStop | None = None
    "Repetitions that end the sequence, but not before min_tokens."
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    "Seed, always concrete: the front draws one if the client gave none."
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    "Token sequences that must not appear in the output."
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    "Number of the likeliest tokens whose log-probabilities are reported besides each token's own. None: no report."
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number of the likeliest tokens reported for each token of the prompt. The whole prompt is computed then, whatever is
    cached."""
    grammar: Grammar | None = None
    """Grammar of the answer. Only tokens that the grammar allows are drawn. If it allows only an end the sequence ends, even
    before min_tokens."""

    thinking: Thinking | None = None
    "Position of the thought, and its budget."
    pooling: Pooling | None = None
    """The prompt's hidden states, after the last norm, become one vector of length 1, delivered with the first token: their
    mean or the first one ("cls"), for which the whole prompt is computed whatever is cached, or the last one."""
    drafts_max: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    "Maximum of draft tokens per step (speculative decoding), below that of the instance. It changes no token."
    label_ids: tuple[TokenId, ...] = ()
    """Labels whose logits replace the vector, with `pooling`. Labels are tokens of the output head, for which `pooling` is
    "last", or classes of a model with a classification head."""

    @property
    def stop_length_min(self) -> int:
        """Length from which a stop id ends the sequence. The sampler suppresses stop ids until min_tokens; with a grammar it
        allows one earlier only if nothing else is allowed, and then it must count."""
        return 0 if self.grammar is not None else self.min_tokens


OPENAI_SAMPLING: Mapping[str, int | float] = MappingProxyType(
    {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
"""Defaults of OpenAI's API, used if the model's files have none."""


class GenerateRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, n sequences. Sent again with its delivered tokens (a replay), it continues as if nothing had happened."""

    id: RequestId
    prompt: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    sampling: SamplingParams = SamplingParams()
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    priority: int = 0
    "Priority: lower is more urgent, as in vLLM."
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    "Seconds after its arrival at which the request ends, with the tokens it has."
    salt: bytes = b""
    "Cache salt: requests share cached blocks only within one salt (a tenant, say)."
    attempt: Count = 1
    "Number of the attempt. A higher one of an open id ends the lower silently."
    indices: tuple[Annotated[int, Meta(ge=0, le=127)], ...] = ()
    "Indices of the wanted sequences, ascending. Empty: all of them. The first one leads."
    outputs: tuple[tuple[TokenId, ...], ...] = ()
    "Tokens that the client already has, for each wanted sequence. Empty: none."
    age_seconds: Annotated[float, Meta(ge=0.0)] = 0.0
    "Seconds since the first attempt arrived: a replay keeps its place in the queue."
    extras: tuple[Extra, ...] = ()
    "Inputs besides tokens that KV depends on, by ascending position: part of the block keys. No API sets them today."
    traceparent: Annotated[str, Meta(pattern=rf"^({TRACEPARENT_PATTERN})?\Z")] = ""
    "The trace that the client's request belongs to. Empty: none. It does not affect the answer."

    def __post_init__(self) -> None:
        """Reject contradictory requests here, so that no later code has to check."""
        if any(a >= b for a, b in pairwise(self.indices)) or (self.indices and self.indices[-1] >= self.n):
            raise ValueError(f"indices {self.indices} are not rising numbers below n = {self.n}")
        if self.outputs and len(self.outputs) != len(self.wanted):
            raise ValueError(f"{len(self.outputs)} outputs for {len(self.wanted)} wanted sequences")
        if any(a >= b for (a, _), (b, _) in pairwise(self.extras)):
            raise ValueError("the positions of extras do not rise")

    @property
    def wanted(self) -> Sequence[int]:
        return self.indices or range(self.n)

    def delivered(self, index: int) -> tuple[TokenId, ...]:
        """Tokens of a wanted sequence that the client already has."""
        return self.outputs[self.wanted.index(index)] if self.outputs else ()


class GenerateBatch(Struct, frozen=True, array_like=True):
    """Requests that differ in prompt and max_tokens only, as those of one prompt list do. Shared fields are sent once."""

    first: GenerateRequest
    others: tuple[tuple[RequestId, Annotated[tuple[TokenId, ...], Meta(min_length=1)], Count], ...]
    "Id, prompt and max_tokens of each request."

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest]) -> GenerateBatch:
        return cls(requests[0], tuple((other.id, other.prompt, other.sampling.max_tokens) for other in requests[1:]))

    def requests(self) -> list[GenerateRequest]:
        """The requests one by one. Their settings share the same lists in memory."""
        first = self.first
        others = (
            replace(first, id=id_, prompt=prompt, sampling=replace(first.sampling, max_tokens=max_tokens))
            for id_, prompt, max_tokens in self.others
        )
        return [first, *others]


def shares_settings(request: GenerateRequest, first: GenerateRequest) -> bool:
    """Whether the request can be sent in one batch with `first`."""
    sampling = replace(request.sampling, max_tokens=first.sampling.max_tokens)
    return replace(request, id=first.id, prompt=first.prompt, sampling=sampling) == first


def sampling_bytes(sampling: SamplingParams) -> int:
    """Upper bound of the settings' encoded size in bytes."""
    words = sum(map(len, sampling.bad_words)) + len(sampling.bad_words)
    lists = 5 * (len(sampling.stop_token_ids) + len(sampling.label_ids) + words) + 15 * len(sampling.logit_bias)
    thinking = 0 if sampling.thinking is None else THINKING_BYTES_MAX
    return 512 + lists + grammar_bytes(sampling.grammar) + thinking


class FinishReason(StrEnum):
    """Reason of a sequence's end. The value is also the metric label and the word in logs."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    "Repetition; only for requests with a repetition_stop: a build that does not know that field never receives the value."
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


RefusalReason = Literal[
    "never_fits",
    "never_planned",
    "never_queued",
    "queue_full",
    "queue_tokens_full",
    "queued_too_long",
    "duplicate_id",
    "draining",
    "paused",
    "worker_gone",
    "no_room",
]


class Refused(Struct, frozen=True):
    """The answer to a request that is refused: at once, as a whole, with the numbers."""

    reason: RefusalReason
    needed: Counter = 0
    limit: Counter = 0

    def __str__(self) -> str:
        match self.reason:
            case "never_fits":
                return (
                    f"the request can need {self.needed} KV blocks and the pool has {self.limit}: "
                    "shorten the prompt, lower max_tokens, or give the instance more blocks"
                )
            case "never_planned":
                return f"the request can need {self.needed} bytes of a step's plan, which may have {self.limit}"
            case "never_queued":
                return f"the request alone would fill the queue: {self.needed}, and the queue holds {self.limit}"
            case "queue_full":
                return f"{self.needed} sequences would wait and the queue holds {self.limit}"
            case "queue_tokens_full":
                return f"{self.needed} prompt tokens would wait and the queue holds {self.limit}"
            case "queued_too_long":  # only from a router to its own API: never sent to another process
                return f"the request waited {self.needed} s for an instance with room (limit {self.limit} s)"
            case "duplicate_id":
                return "a request with this id is still running"
            case "draining":
                return "the instance is draining and takes no new requests"
            case "paused":
                return "the instance is paused"
            case "no_room":
                return f"a hand-off needs {self.needed} KV blocks now and {self.limit} can be had"
            case "worker_gone":
                if not self.needed:  # from a router: nothing was counted
                    return "no instance that works is there to take the request"
                return f"the worker was lost {self.needed} times in a row (limit {self.limit})"
