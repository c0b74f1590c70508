"""Log-probabilities in the three shapes that clients read: OpenAI's chat, OpenAI's completions, vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from baton.api.errors import JsonRows
from baton.api.generate.engine_client import TokenLogprob
from baton.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"The number for minus infinity, which JSON lacks; vLLM's clients know it."


def number(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST  # also for NaN


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    return {
        "content": JsonRows(partial(_chat_row, tokenizer), [entry for entry in logprobs if entry is not None]),
        "refusal": None,
    }


def _chat_row(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    return {
        **_chat_token(tokenizer, entry.token, entry.logprob),
        "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top],
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
    """Log-probabilities in the four columns of completions. `asked`: number of top tokens that the client wants; the sampled
    token is always included."""
    rows = list(logprobs) or [None] * len(tokens)
    return {
        "tokens": JsonRows(partial(token_name, tokenizer), tokens),
        "token_logprobs": JsonRows(lambda row: None if row is None else number(row.logprob), rows),
        "top_logprobs": JsonRows(partial(_top, tokenizer), rows) if asked else None,
        "text_offset": list(offsets),
    }


def _top(tokenizer: Tokenizer, row: TokenLogprob | None) -> dict[str, float] | None:
    if row is None:
        return None
    likeliest = {token_name(tokenizer, token): number(logprob) for token, logprob in row.top}
    likeliest.setdefault(token_name(tokenizer, row.token), number(row.logprob))
    return likeliest


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; if it is only a part of a character, its bytes, so that two such tokens differ."""
    raw = tokenizer.id_to_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprob | None]) -> JsonRows:
    """Log-probabilities of a prompt in vLLM's form: by token id, with rank; null for the first token, which has no
    prediction."""
    return JsonRows(partial(_by_id, tokenizer), rows)


def _by_id(tokenizer: Tokenizer, row: TokenLogprob | None) -> dict[str, Any] | None:
    if row is None:
        return None

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": number(logprob), "rank": rank, "decoded_token": token_name(tokenizer, token)}

    found = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(row.top, start=1)}
    found.setdefault(str(row.token), entry(row.token, row.logprob, row.rank))
    return found
