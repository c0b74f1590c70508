"""Rate limit of repeated log messages: each is logged once per minute, with its count, so that no peer can fill the disk."""

from __future__ import annotations

from typing import Final

AGAIN_SECONDS: Final = 60.0
KEYS_MAX: Final = 256
TEXT_CHARACTERS_MAX: Final = 300


class Repeats:
    """Counts of messages by key, e.g. (peer, reason). Beyond `keys_max` keys the one logged longest ago is forgotten."""

    def __init__(self, seconds: float = AGAIN_SECONDS, keys_max: int = KEYS_MAX) -> None:
        self._seconds = seconds
        self._keys_max = keys_max
        self._logged: dict[object, tuple[float, int]] = {}
        "Time of the next log line, and the count since the last one."

    def due(self, key: object, now: float) -> int:
        """The count since the last log line, this one included. 0: must not be logged now."""
        again, came = self._logged.get(key, (now, 0))
        if now < again:
            self._logged[key] = again, came + 1
            return 0
        self._logged.pop(key, None)
        self._logged[key] = now + self._seconds, 0
        if len(self._logged) > self._keys_max:
            del self._logged[next(iter(self._logged))]
        return came + 1


def printable(text: str) -> str:
    """Text of another process for a log or an error: one line, truncated."""
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 3] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
