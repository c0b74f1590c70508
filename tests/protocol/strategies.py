"""Hypothesis strategies from the types themselves: a field that is added to a message is tested from that moment on."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from baton.protocol.repetition import RepetitionStop
from baton.protocol.request import GenerateRequest

INT = (-(2**63), 2**63 - 1)


@cache
def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """All values that the protocol allows for a message class or a field."""  # kept: building it takes longer than a draw
    return _values(inspect.type_info(annotation))


def _consistent(values: dict[str, Any]) -> dict[str, Any]:
    """A request whose wanted sequences are some of its n, with an output for each of them or for none."""
    indices = tuple(sorted({index % values["n"] for index in values["indices"]}))
    wanted = len(indices) or values["n"]
    extras = tuple(sorted(dict(values["extras"]).items()))
    return {**values, "indices": indices, "outputs": (values["outputs"] * wanted)[:wanted], "extras": extras}


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """The least length of a pattern is not above the most."""
    least, most = sorted((values["pattern_min"], values["pattern_max"]))
    return {**values, "pattern_min": least, "pattern_max": most}


CONSISTENT = {GenerateRequest: _consistent, RepetitionStop: _ordered}


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            given = st.fixed_dictionaries({field.name: _values(field.type) for field in fields})
            return given.map(lambda values: cls(**CONSISTENT.get(cls, dict)(values)))
        case inspect.IntType(gt=None, lt=None, ge=low, le=high):
            return st.integers(INT[0] if low is None else low, INT[1] if high is None else high)
        case inspect.FloatType(gt=above, ge=low, le=high, lt=None):
            low = above if low is None else low
            return st.floats(low, high, exclude_min=above is not None, allow_nan=False)
        case inspect.StrType(min_length=least, max_length=most, pattern=None):
            return st.text(min_size=least or 0, max_size=min(20, most or 20))
        case inspect.StrType(pattern=pattern):
            return st.from_regex(pattern, fullmatch=True)
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(40, most or 40))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(_values(item), min_size=least or 0, max_size=(least or 0) + 3).map(tuple)
        case inspect.ListType(item_type=item, min_length=least):
            return st.lists(_values(item), min_size=least or 0, max_size=(least or 0) + 3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case inspect.UnionType(types=types):
            return st.one_of(*map(_values, types))
    raise NotImplementedError(f"no strategy for {info}")
