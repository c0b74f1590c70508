"""Every limit of the HTTP edge, in one place.

A value is checked before anything of its size is allocated. `Limits` has the operator's settings (sizes, counts, seconds);
`RANGES` has the ranges of numbers in a request. The limits on the shape of a chat (4096 messages, ...) are TemplateLimits in
text/chat_template.py, enforced there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from msgspec import inspect

from baton.errors import InvalidConfig
from baton.protocol.request import SamplingParams
from baton.text.stops import STOP_BYTES_MAX, STOPS_MAX

MIB: Final = 1024 * 1024
INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes, counts and times that an operator may change (docs/limits.md)."""

    body_bytes: int = 8 * MIB
    "Bytes of a body. Over it: 413. Compressed bodies are refused, so these are bytes of JSON."
    body_seconds: float = 60.0
    "Seconds from the end of the headers to the end of the body. Over it: 408."
    header_bytes: int = 64 * 1024
    "Bytes of request line and headers together. Over it: 431 and the connection is closed."
    header_seconds: float = 10.0
    "Seconds from the first byte (or the connection) to the end of the headers. Over it the connection is closed."
    json_depth: int = 64
    "Depth of nested lists and objects."
    json_values: int = 320 * 1024
    "Entries of all lists and objects of a large body (128 KiB or more)."
    object_keys: int = 1024
    "Keys of one object. 256 would do but for logit_bias, which may name `token_ids` tokens."
    top_level_keys: int = 256
    "Number of keys of the request object itself."
    model_bytes: int = 256
    "Characters of a model name. A longer name is unknown: 404."
    prompts: int = 64
    "Number of prompts in one completions request."
    choices: int = 64
    "Number of choices: n x prompts. Of more inputs for embeddings this many are in the engine at a time."
    embedding_inputs: int = 2048
    "Number of texts in one request for embeddings: OpenAI's limit, which its clients use fully."
    request_tokens: int = 4 * MIB
    "Output tokens of a request: n x prompts x max_tokens, after max_tokens is clipped to the context."
    characters_per_token: int = 64
    "Characters of a prompt per token of the context. Text has about four; only long runs of spaces reach this."
    prompt_tokens: int = 256 * 1024
    "Tokens of all prompts of a request together. A single prompt may have the whole context."
    logprob_entries: int = 2_000_000
    "Number of log-probabilities in one answer: tokens x (1 + requested alternatives)."
    prompt_logprob_entries: int = 200_000
    "Number of log-probabilities of prompts, which all arrive at once."
    stop_strings: int = STOPS_MAX
    "Number of stop strings, at most the limit of text/stops.py."
    stop_string_bytes: int = STOP_BYTES_MAX
    token_ids: int = 1024
    "Number of entries of stop_token_ids, logit_bias and bad_words."
    bad_word_bytes: int = 1024
    bad_words_bytes: int = 16 * 1024
    "Bytes of all bad words of a request together."
    bad_words_tokens: int = 4096
    "Tokens of all bad words, each at the start of a text and after a space."
    tools_bytes: int = 1 * MIB
    "Bytes of all tools of a chat together, as JSON."
    grammar_bytes: int = 64 * 1024
    "Bytes of a schema, regular expression or grammar that the answer must follow."
    choices_listed: int = 1024
    "Number of entries of guided_choice."
    tokenize_bytes: int = 1 * MIB
    "Text of /tokenize. /detokenize takes as many ids as the context has tokens."
    name_bytes: int = 256
    "Characters of user, cache_salt, request ids and idempotency keys."
    api_key_bytes: int = 1024
    "Characters of an API key. A longer key is refused unread."
    streams: int = 1024
    "Number of requests in progress. Over it: 429."
    bytes_in_flight: int = 256 * MIB
    "Bytes of bodies being read or prepared and of whole answers being sent, of all requests. Over it: 429."
    send_buffer_bytes: int = 4 * MIB
    "Unsent bytes for a slow reader; over it the request is cancelled."
    write_seconds: float = 60.0
    "Seconds after which a client that reads nothing is dropped."
    prepare_seconds: float = 60.0
    "Seconds to parse, render and tokenise one request, including the wait for a thread. Over it: 503."
    request_seconds: float = 3600.0
    "Seconds of a request's deadline, default and maximum."
    engine_grace_seconds: float = 5.0
    "Seconds that the engine may take to report a deadline or an abort."
    ping_seconds: float = 2.0
    "Seconds that /health waits for the engine, which answers at once unless it hangs."
    idempotency_bytes: int = 32 * MIB
    "Finished answers kept for requests with an Idempotency-Key."
    idempotency_entries: int = 4096
    idempotency_answer_bytes: int = 4 * MIB
    "Bytes of a stored answer. A larger one is not stored: its retry is generated again."
    stored_responses: int = 1024
    """Number of stored answers of /v1/responses, for previous_response_id and GET. The tenant with the most loses its oldest
    first."""
    stored_response_bytes: int = 64 * MIB
    "Bytes of all stored answers, each with its conversation."
    connections: int = 2304
    "Number of open connections, idle ones too: room above `streams`, to answer 429. Over it: 503 on all routes but health."
    connections_per_address: int = 2048
    "Number of open connections from one address, so that one peer does not shut out all others. Over it: 429."
    handshakes: int = 256
    "Number of connections in a TLS handshake. Over it the oldest is closed."

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InvalidConfig(f"limits.{field.name} is {getattr(self, field.name)}: it must be more than 0")
        if self.stop_strings > STOPS_MAX or self.stop_string_bytes > STOP_BYTES_MAX:
            raise InvalidConfig(f"limits: at most {STOPS_MAX} stop strings of {STOP_BYTES_MAX} bytes can be matched")


class FieldRange(NamedTuple):
    """An allowed range of numbers: integers if both ends are ints."""

    low: float | int
    high: float | int
    low_excluded: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not self.low <= value <= self.high:  # the comparison is False for NaN
            return False
        return not (self.low_excluded and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} {'above' if self.low_excluded else 'from'} {self.low} to {self.high}"


def _sampling_ranges() -> dict[str, FieldRange]:
    """Ranges of the numbers in SamplingParams, from their types."""
    info = inspect.type_info(SamplingParams)
    assert isinstance(info, inspect.StructType)
    found = {}
    for field in info.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, inspect.IntType | inspect.FloatType):
                low = kind.gt if kind.ge is None else kind.ge
                assert low is not None
                found[field.name] = FieldRange(low, INT32_MAX if kind.le is None else kind.le, low_excluded=kind.ge is None)
    return found


RANGES: Final[dict[str, FieldRange]] = {
    **{name: allowed for name, allowed in _sampling_ranges().items() if name != "drafts_max"},
    "top_p": FieldRange(0.0, 1.0),  # 0: the likeliest token
    "max_completion_tokens": FieldRange(1, INT32_MAX),
    "n": FieldRange(1, 16),
    "best_of": FieldRange(1, 16),
    "top_logprobs": FieldRange(0, 20),
    "truncate_prompt_tokens": FieldRange(1, INT32_MAX),  # or -1: the room in the context
    "speculative.n_max": FieldRange(0, INT32_MAX),
    "priority": FieldRange(-(2**31), INT32_MAX),
    "timeout": FieldRange(0.0, 1e9, low_excluded=True),  # and not more than limits.request_seconds
    "drain_seconds": FieldRange(0.0, 86400.0),
}

LOGIT_BIAS_MAX: Final = 100.0
"Bound of a bias: OpenAI's documented range. Finite values beyond it are clamped."
