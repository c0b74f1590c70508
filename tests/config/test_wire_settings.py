"""Bounds of connections in a cluster: chosen by the operator, shown as they are in force, told to every process."""

from __future__ import annotations

import pytest

from baton.config import ServeConfig, WireConfig, shown
from baton.errors import InvalidConfig


def test_what_is_chosen_is_told_to_engine_and_cache_service_and_the_rest_is_shown_too():
    config = ServeConfig(wire={"readers_max": 512, "peer_idle_seconds": 5})
    wire = WireConfig(readers_max=512, peer_idle_seconds=5)
    assert config.engine().wire == wire
    assert config.engine().cache().wire == wire
    in_force = shown(config)["wire"]
    assert isinstance(in_force, dict)
    assert (in_force["readers_max"], in_force["peers_max"]) == (512, WireConfig().peers_max)


@pytest.mark.parametrize(
    ("wire", "words"),
    [({"reader_max": 1}, "did you mean readers_max"), ({"qqq": 1}, "see docs/limits.md"), ({"readers_max": 0}, "from 1 to")],
)
def test_a_bound_that_cannot_be_is_refused_in_words(wire, words):
    with pytest.raises(InvalidConfig, match=words):
        ServeConfig(wire=wire)
