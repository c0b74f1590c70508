"""Token usage of an answer, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from baton.api.generate.generation import Usage


def usage_json(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] | None = None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}
    below = usage.host_tokens + usage.storage_tokens
    if details is not None and below:
        device = details["cached_tokens"] - below
        details["cached_tokens_by_tier"] = {"device": device, "host": usage.host_tokens, "storage": usage.storage_tokens}
    thoughts = usage.reasoning_tokens
    output = {**({} if thoughts is None else {"reasoning_tokens": thoughts}), **drafts_json(usage)}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": details,
        **({"completion_tokens_details": output} if output else {}),
        **preemptions_json(usage),
    }


def drafts_json(usage: Usage) -> dict[str, int]:
    """Counters of verified draft tokens; absent if there were none."""
    if not usage.drafted_tokens:
        return {}
    rejected = usage.drafted_tokens - usage.accepted_tokens
    return {"accepted_prediction_tokens": usage.accepted_tokens, "rejected_prediction_tokens": rejected}


def preemptions_json(usage: Usage) -> dict[str, int]:
    """Number of preemptions, absent if zero. An extension field: clients ignore unknown fields."""
    return {"baton_preemptions": usage.preemptions} if usage.preemptions else {}
