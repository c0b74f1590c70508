"""Keywords of `LLM(...)`: fields of ServeConfig, the names that other engines have for them, and what they have besides."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.familiar import FAMILIAR, verdict_on

_OURS = {name: field for field, names in FAMILIAR.items() for name in names}

log = logging.getLogger(__name__)


def serve_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ServeConfig. Raises InvalidConfig for a name that means nothing, or for two names of one field."""
    known = [field.name for field in fields(ServeConfig)]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "quantization" and value is None:
            continue
        if (verdict := verdict_on(name, value)) is not None:
            if verdict.taken == "refused":
                raise InvalidConfig(f"{name} {verdict.words}")
            log.info("LLM: %s %s", name, verdict.words)
            continue
        field = _OURS.get(name, name)
        if field not in known:
            close = difflib.get_close_matches(name, [*known, *_OURS], n=1, cutoff=0.7)
            raise InvalidConfig(f"{name} is no setting of LLM" + (f"; did you mean {close[0]}?" if close else ""))
        if field == "model":
            raise InvalidConfig(f"{name} is no setting of LLM: the model is its first argument")
        if field in found:
            raise InvalidConfig(f"{field} is given twice, the second time as {name}")
        found[field] = value
    return found
