"""Keywords of `LLM(...)`: fields of ServeConfig, and other engines' names for them and for settings that Baton lacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from baton.config import ServeConfig
from baton.config.schema import all_settings
from baton.errors import InvalidConfig
from baton.familiar import BY_ALIAS, FOREIGN, PAIR, closest, in_our_words, line_about, switched_on, verdict_on
from baton.familiar.speculation import Unusable, spread

_FIELDS = {field.name: field for field in fields(ServeConfig)}
_FLAGS = frozenset(setting.name for setting in all_settings() if setting.kind is bool)
_FLAGS |= {name for name, alias in BY_ALIAS.items() if alias.setting in _FLAGS}
_FLAGS |= {name for name, row in FOREIGN.items() if row.flag}

log = logging.getLogger(__name__)


def serve_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ServeConfig. Raises InvalidConfig for an unknown name, or for two names of one field."""
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    try:
        each = [switched_on(name, value, _FLAGS) for name, value in spread(given)]
    except Unusable as error:
        raise InvalidConfig(str(error)) from None
    for name, value in each:
        if name == "quantization" and value is None:
            continue
        if (verdict := verdict_on(name, value)) is not None:
            if verdict.taken == "refused":
                raise InvalidConfig(f"{name} {verdict.words}")
            log.info("LLM: %s %s", name, verdict.words)
            continue
        field = BY_ALIAS[name].setting if name in BY_ALIAS else name
        if field not in _FIELDS:
            close = closest(name, [*_FIELDS, *BY_ALIAS])
            ours = BY_ALIAS[close].setting if close in BY_ALIAS else close
            raise InvalidConfig(f"{name} is no setting of LLM" + (f"; did you mean {ours}?" if close else ""))
        if field == "model":
            raise InvalidConfig(f"{name} is no setting of LLM: the model is its first argument")
        taken = _taken(name, field, value)
        if field in found and not (taken == found[field] and {name, names[field]} <= PAIR):
            raise InvalidConfig(f"{field} is given twice, the second time as {name}")
        found[field], names[field] = taken, name
    return found


def _taken(name: str, field: str, value: Any) -> Any:
    if line := line_about(field, value):
        log.warning("LLM: %s=%s: %s", name, value, line)
    try:
        taken = in_our_words(name, field, value)
    except ValueError:
        raise InvalidConfig(f"{name} is {value!r}: it must be a number") from None
    several = isinstance(_FIELDS[field].default, tuple)
    if several and isinstance(taken, str | list):
        return (taken,) if isinstance(taken, str) else tuple(taken)
    return taken
