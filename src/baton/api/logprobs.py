"""Log-probabilities in the three shapes that clients read: OpenAI's chat, OpenAI's completions, vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.engine_client import TokenLogprob
from baton.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"JSON has no minus infinity; vLLM's clients know this number for it."


def number(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST  # also for NaN


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
            if entry is not None
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.id_to_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": number(logprob), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    asked: int,
) -> dict[str, Any]:
    """Four columns. `asked` is how many of the likeliest the client wants; the token itself is always among them."""
    rows = list(logprobs) or [None] * len(tokens)
    return {
        "tokens": [token_name(tokenizer, token) for token in tokens],
        "token_logprobs": [None if row is None else number(row.logprob) for row in rows],
        "top_logprobs": [None if row is None else _top(tokenizer, row) for row in rows] if asked else None,
        "text_offset": list(offsets),
    }


def _top(tokenizer: Tokenizer, row: TokenLogprob) -> dict[str, float]:
    likeliest = {token_name(tokenizer, token): number(logprob) for token, logprob in row.top}
    likeliest.setdefault(token_name(tokenizer, row.token), number(row.logprob))
    return likeliest


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Its text; or, where it is only a part of a character, its bytes, so that two such tokens do not look the same."""
    raw = tokenizer.id_to_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """vLLM's: by token id, with rank; null for the first token, which nothing predicts."""
    return [None if row is None else _by_id(tokenizer, row) for row in rows]


def _by_id(tokenizer: Tokenizer, row: TokenLogprob) -> dict[str, Any]:
    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": number(logprob), "rank": rank, "decoded_token": token_name(tokenizer, token)}

    found = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(row.top, start=1)}
    found.setdefault(str(row.token), entry(row.token, row.logprob, row.rank))
    return found
