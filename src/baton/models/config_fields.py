"""Typed access to the loosely typed settings of a model file, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported

LAYERS_MAX = 10_000
INTEGER_MAX = 2**63
"""Bound of numbers: larger ones are no size of a model, and no float."""
POSITIVE_MIN, POSITIVE_MAX = 1e-30, 1e30
"""Bounds of factors, so that their squares and quotients are numbers."""


class ConfigFields:
    """Settings of any type by key. `origin`: the name in errors; `prefix`: prepended to every key."""

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "") -> None:
        self.values = values
        self.origin = origin
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, default, int, "a whole number")  # type: ignore[no-any-return]

    def layer_count(self, key: str) -> int:
        """The number of layers. It is bounded, because objects are built for every layer before any tensor could contradict
        it."""
        count = self.integer(key)
        if count > LAYERS_MAX:
            raise ModelFileBroken(f"{self.origin}: {self.prefix + key} is {count}; more than {LAYERS_MAX} is no model")
        return count

    def integer_or_none(self, key: str, default: int | None) -> int | None:
        """An integer. A null key means None; an absent key means `default`."""
        return None if self.get(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not POSITIVE_MIN <= value <= POSITIVE_MAX:
            raise ModelFileBroken(
                f"{self.origin}: {self.prefix + key} is {value}; it must be positive, from {POSITIVE_MIN} to {POSITIVE_MAX}"
            )
        return value

    def boolean(self, key: str, default: bool) -> bool:
        return self._typed(key, default, bool, "true or false")  # type: ignore[no-any-return]

    def text(self, key: str) -> str:
        return self._typed(key, None, str, "a string")  # type: ignore[no-any-return]

    def texts(self, key: str, allowed: Collection[str], count: int) -> list[str]:
        """A list of `count` words, each one of `allowed`."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, str) and v in allowed for v in value):
            raise ModelUnsupported(
                f"{self.origin}: {self.prefix + key} is {value!r}; supported are lists of {count} of {', '.join(allowed)}"
            )
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if absent or null."""
        value = self.get(key, None)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ModelFileBroken(f"{self.origin}: {self.prefix + key} is {value!r}; it must be a list of whole numbers")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids from one id, a list of ids, or null."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelFileBroken(f"{self.origin}: {self.prefix + key} is {value!r}; it must be a token id or a list")
        return tuple(ids)

    def _typed(self, key: str, default: Any, wanted: type | tuple[type, ...], description: str) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileBroken(f"{self.origin}: the setting {self.prefix + key} is missing; it must be {description}")
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ModelFileBroken(f"{self.origin}: {self.prefix + key} is {value!r}; it must be {description}")
        if isinstance(value, int) and abs(value) > INTEGER_MAX:
            raise ModelFileBroken(f"{self.origin}: {self.prefix + key} has {len(str(abs(value)))} digits; no model has that")
        return value
