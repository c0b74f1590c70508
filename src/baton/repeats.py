"""The same trouble is logged once a minute, with how often it came: whoever causes it must not fill the disk."""

from __future__ import annotations

from typing import Final

AGAIN_SECONDS: Final = 60.0
KEYS_MAX: Final = 256
TEXT_CHARACTERS_MAX: Final = 300


class Repeats:
    """By key, as (peer, reason). Of more than `keys_max` keys the one logged longest ago is forgotten."""

    def __init__(self, seconds: float = AGAIN_SECONDS, keys_max: int = KEYS_MAX) -> None:
        self._seconds = seconds
        self._keys_max = keys_max
        self._logged: dict[object, tuple[float, int]] = {}
        "When it is logged again, and how often it came since it was logged."

    def due(self, key: object, now: float) -> int:
        """How often it came since it was last logged, this time included. 0: it is not to be logged now."""
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
    """What another process has sent, as it may be in a log or an error: on one line, and not long."""
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 3] + "..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
