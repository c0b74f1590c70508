"""The models of test_all_traits_at_once have every trait: one that is added and forgotten there fails here."""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from baton.models.config import Experts, RopeScaling, Traits
from baton.testing.platforms import SCALINGS, TINY, all_traits

MODELS = [all_traits(TINY, kind) for kind in SCALINGS]
TRAITS = [model.traits for model in MODELS]
EXPERTS = [model.experts for model in MODELS if model.experts is not None]


def never_set(kind: type, cases: list[Any]) -> list[str]:
    """Fields, and words of a field that has a choice of them, that no case has beside the default."""
    hints, missing = get_type_hints(kind), []
    for field in fields(kind):
        seen = {getattr(case, field.name) for case in cases} | {default_of(field)}
        if get_origin(hints[field.name]) is Literal:
            missing += [f"{field.name}={word}" for word in get_args(hints[field.name]) if word not in seen]
        elif len(seen) < 2:
            missing.append(field.name)
    return missing


def default_of(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def test_every_trait_is_set_by_some_model():
    assert never_set(Traits, TRAITS) == []


def test_so_is_every_setting_of_experts():
    assert never_set(Experts, EXPERTS) == []
    assert {mixture.normalised for mixture in EXPERTS} == {True, False}
    assert {mixture.scoring for mixture in EXPERTS} == {"softmax", "sigmoid"}


def test_so_is_every_scaling_of_rotary_positions():
    found = {type(rope.scaling) for traits in TRAITS for rope in traits.layer_ropes}
    assert set(get_args(RopeScaling)) <= found
    assert isinstance(RopeScaling, types.UnionType)
    assert all({rope.dimensions for rope in traits.layer_ropes} == {8, 0} for traits in TRAITS)


@pytest.mark.parametrize(
    ("forgotten", "name"),
    [({"logits_scale": 1.0}, "logits_scale"), ({"sinks": False}, "sinks"), ({"norms": "both"}, "norms=after")],
)
def test_a_trait_that_no_model_sets_is_noticed(forgotten, name):
    assert name in never_set(Traits, [replace(traits, **forgotten) for traits in TRAITS])


def test_a_new_trait_is_noticed():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class More(Traits):
        soft_cap: float | None = None

    assert never_set(
        More, [More(**{field.name: getattr(traits, field.name) for field in fields(Traits)}) for traits in TRAITS]
    ) == ["soft_cap"]
