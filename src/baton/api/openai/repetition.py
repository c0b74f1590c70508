"""The fields that end an answer that repeats itself -> a RepetitionStop.

    stop_on_repetition     true or false; default: the server's (--stop-on-repetition)
    repetition_detection   vLLM's: {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}

The server's own default does not apply if the client requests a length (ignore_eos) or a format: there a repetition may be
wanted, and half of a JSON document is useless.
"""

from __future__ import annotations

from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import Fields, expect, shown, whole_number
from baton.api.limits import FieldRange
from baton.protocol.repetition import COUNT_MAX, PATTERN_TOKENS_MAX, STOP_ON_REPETITION, RepetitionStop

_DETECTION: Final = {
    "max_pattern_size": FieldRange(0, PATTERN_TOKENS_MAX),  # 0: off, as in vLLM
    "min_pattern_size": FieldRange(0, PATTERN_TOKENS_MAX),  # 0 is 1
    "min_count": FieldRange(2, COUNT_MAX),
}


def repetition_stop_of(fields: Fields, *, default: bool) -> RepetitionStop | None:
    """The rule that a body's fields set. `default`: the server's setting."""
    detection = fields.raw("repetition_detection")
    wanted = fields.boolean("stop_on_repetition", default=default)
    if detection is None:
        return STOP_ON_REPETITION if wanted else None
    if fields.raw("stop_on_repetition") is False:
        raise bad(
            "stop_on_repetition is false, and repetition_detection is given: leave one of them out", "repetition_detection"
        )
    return _detection(detection)


def _detection(value: Any) -> RepetitionStop | None:
    """Reads vLLM's repetition_detection. None: it is off."""
    expect(dict, value, "repetition_detection")
    unknown = [name for name in value if name not in _DETECTION]
    if unknown:
        known = ", ".join(_DETECTION)
        raise bad(f"repetition_detection.{shown(unknown[0])} is not known: there are {known}", "repetition_detection")
    longest, shortest = (_size(value, name) for name in ("max_pattern_size", "min_pattern_size"))
    if not longest:
        return None
    if shortest > longest:
        raise bad(
            f"repetition_detection.min_pattern_size ({shortest}) is more than max_pattern_size ({longest})",
            "repetition_detection",
        )
    name = "min_count"
    count = whole_number(value.get(name, 0), _DETECTION[name], f"repetition_detection.{name}", "repetition_detection")
    return RepetitionStop(pattern_max=longest, pattern_min=max(1, shortest), count_min=count, tokens_min=0)


def _size(value: dict[str, Any], name: str) -> int:
    return whole_number(value.get(name, 0), _DETECTION[name], f"repetition_detection.{name}", "repetition_detection")
