"""Keywords of `LLM(...)`: fields of ServeConfig, the names that vLLM has for them, and what vLLM has and means nothing here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.familiar import FAMILIAR

_OURS = {name: field for field, names in FAMILIAR.items() for name in names}
_MEANS_NOTHING = (
    *("trust_remote_code", "enforce_eager", "disable_log_stats", "tokenizer_mode", "disable_custom_all_reduce"),
    *("max_seq_len_to_capture", "swap_space", "enable_chunked_prefill", "max_logprobs"),
)
"Code of a model's repository is never run, and the others choose between ways that are one here, or bound what is bounded."
_ONLY_ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def serve_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ServeConfig. Raises InvalidConfig for a name that means nothing, or for two names of one field."""
    known = [field.name for field in fields(ServeConfig)]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _MEANS_NOTHING or (name == "quantization" and value is None):
            continue
        if name in _ONLY_ONE:
            if value != 1:
                raise InvalidConfig(f"{name} is {value!r}: an LLM computes on one device")
            continue
        field = _OURS.get(name, name)
        if field not in known:
            close = difflib.get_close_matches(name, [*known, *_OURS], n=1, cutoff=0.7)
            raise InvalidConfig(f"{name} is no setting of LLM" + (f"; did you mean {close[0]}?" if close else ""))
        if field in found:
            raise InvalidConfig(f"{field} is given twice, the second time as {name}")
        found[field] = value
    return found
