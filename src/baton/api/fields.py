"""Reads fields of a JSON object one by one, each checked against its limit. Null counts as absent, as at OpenAI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeVar, overload

from baton.api.errors import ApiError, bad
from baton.api.limits import LOGIT_BIAS_MAX, RANGES, FieldRange, Limits

T = TypeVar("T")
_KINDS: Final[dict[Any, str]] = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
_NOTES: Final = {"temperature": " (2 is OpenAI's maximum)"}


class Fields:
    def __init__(self, body: dict[str, Any], limits: Limits, head_width: int) -> None:
        self._body = body
        self._limits = limits
        self._head_width = head_width
        self._known: set[str] = set()
        self._inner: list[str] = []
        "Paths of unknown fields in nested objects."

    def raw(self, name: str) -> Any:
        """A field's unchecked value; None where it is null or absent."""
        self._known.add(name)
        return self._body.get(name)

    def know(self, names: Iterable[str]) -> None:
        """Marks fields as known that are read elsewhere or need not be read."""
        self._known.update(names)

    def object(self, name: str, known: tuple[str, ...]) -> dict[str, Any] | None:
        """A nested object. Its keys outside of `known` count as unknown fields."""
        if self.raw(name) is None:
            return None
        value: dict[str, Any] = expect(dict, self.raw(name), name)
        self._inner += [f"{name}.{key}" for key in value if key not in known and value[key] is not None]
        return value

    def given(self, name: str, aliases: tuple[str, ...]) -> str:
        """The name under which the field is given. Several names may be given if they hold the same value."""
        names = [each for each in (name, *aliases) if self.raw(each) is not None]
        for other in names[1:]:
            if self._body[other] != self._body[names[0]]:
                raise bad(f"{names[0]} and {other} are the same setting and differ: give one of them", other)
        return names[0] if names else name

    @overload
    def integer(self, name: str, default: T, *, like: str | None = None) -> int | T: ...
    @overload
    def integer(self, name: str, default: int | None, *, like: str | None = None, means_none: int) -> int | None: ...
    def integer(self, name: str, default: Any, *, like: str | None = None, means_none: int | None = None) -> Any:
        """A field that is an integer. `like`: the field whose range applies. `means_none`: a value outside of the range that
        stands for None."""
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is int and value == means_none:
            return None
        return whole_number(value, RANGES[like or name], name)

    def number(self, name: str, default: float, *, like: str | None = None) -> float:
        """A field that is a number. `like`: the field whose range applies."""
        value, allowed = self.raw(name), RANGES[like or name]
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
            raise bad(f"{name} must be {allowed}, not {shown(value)}{_NOTES.get(name, '')}", name)
        return float(value) + 0.0  # -0.0 becomes 0.0

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        return default if value is None else expect(bool, value, name)

    def name(self, name: str) -> str:
        """A short printable string (user, cache_salt); empty where absent."""
        value = self.raw(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise bad(f"{name} must be a string, not {shown(value)}", name)
        if len(value) > self._limits.name_bytes or len(value.encode("utf-8", "replace")) > self._limits.name_bytes:
            raise bad(f"{name} is longer than {self._limits.name_bytes} bytes", name)
        if not value.isprintable():
            raise bad(f"{name} has characters that do not print", name)
        return value

    def strings(self, name: str, *, count_max: int, bytes_max: int, empty_allowed: bool = False) -> tuple[str, ...]:
        """A field that is a string or a list of strings."""
        value = self.raw(name)
        if value is None:
            return ()
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise bad(f"{name} must be a string or a list of strings, not {shown(value)}", name)
        if len(value) > count_max:
            raise bad(f"{name} has {len(value)} entries and at most {count_max} are allowed", name)
        for index, entry in enumerate(value):
            if not isinstance(entry, str):
                raise bad(f"{name}[{index}] must be a string, not {shown(entry)}", name)
            if not entry and not empty_allowed:
                raise bad(f"{name}[{index}] is empty", name)
            if len(entry) > bytes_max or len(entry.encode("utf-8", "replace")) > bytes_max:
                raise bad(f"{name}[{index}] is longer than {bytes_max} bytes", name)
        return tuple(value)

    def token_ids(self, name: str, *, count_max: int) -> tuple[int, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise bad(f"{name} must be a list of token ids, not {shown(value)}", name)
        if len(value) > count_max:
            raise bad(f"{name} has {len(value)} entries and at most {count_max} are allowed", name)
        return checked_token_ids(value, self._head_width, name)

    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        value = self.raw("logit_bias")
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise bad(f"logit_bias must be an object from token ids to numbers, not {shown(value)}", "logit_bias")
        if len(value) > self._limits.token_ids:
            raise bad(f"logit_bias has {len(value)} entries and at most {self._limits.token_ids} are allowed", "logit_bias")
        pairs = tuple(sorted(self._bias_entry(key, bias) for key, bias in value.items()))
        if len({token for token, _ in pairs}) != len(pairs):
            raise bad("logit_bias names a token twice", "logit_bias")
        if len(pairs) >= self._head_width and all(bias <= -LOGIT_BIAS_MAX for _, bias in pairs):
            raise bad("logit_bias forbids every token of the model", "logit_bias")
        return pairs

    def _bias_entry(self, key: str, bias: Any) -> tuple[int, float]:
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= self._head_width:
            raise bad(f"logit_bias: {key[:32]!a} is not a token id from 0 to {self._head_width - 1}", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise bad(f"logit_bias[{key}] must be a number, not {shown(bias)}", "logit_bias")
        return int(key), float(max(-LOGIT_BIAS_MAX, min(LOGIT_BIAS_MAX, bias)))

    def finish(self, unknown: Literal["ignore", "refuse"]) -> tuple[str, ...]:
        """Call after every known field is read: returns the names of unknown fields, or refuses the first one. Null values do
        not count."""
        left = [name for name, value in self._body.items() if name not in self._known and value is not None] + self._inner
        if left and unknown == "refuse":
            raise bad(f"unknown field {left[0][:64]!a}", left[0][:64], code="unknown_field")
        return tuple(left)


def whole_number(value: Any, allowed: FieldRange, place: str, param: str = "") -> int:
    """The value as an integer, or an error. `param`: the field that errors name, where `place` is only a part of it."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise bad(f"{place} must be {allowed}, not {shown(value)}", param or place)
    return value


def checked_token_ids(values: list[Any], head_width: int, place: str) -> tuple[int, ...]:
    """The token ids, or an error. This check against the model's output head is the only one: a tokenizer may have more or
    fewer."""
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < head_width:  # not isinstance: booleans are not numbers
            raise _bad_token_id(value, head_width, f"{place}[{index}]", place)
    return tuple(values)


def _bad_token_id(value: Any, head_width: int, place: str, param: str) -> ApiError:
    return bad(f"{place} must be a token id from 0 to {head_width - 1}, not {shown(value)}", param)


def expect(kind: type[T], value: Any, place: str, param: str = "") -> T:
    """Returns the value if it has the type of its field, else raises. `param`: as in whole_number."""
    if not isinstance(value, kind):
        raise bad(f"{place} must be {_KINDS[kind]}, not {shown(value)}", param or place)
    return value


def shown(value: Any) -> str:
    """A wrong value for a message: numbers as they are, otherwise only the type, because the value may be a prompt."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        text = repr(value) if isinstance(value, float) or value.bit_length() < 128 else "a huge number"
        return text[:40]
    names: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "this")
