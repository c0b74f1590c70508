"""Scenario files: they have a version, and older ones are upgraded."""

import json
from dataclasses import fields, is_dataclass

import msgspec
import pytest

from baton.config import InstanceConfig
from baton.sim import scenario as module
from baton.sim.generate import generate
from baton.sim.scenario import VERSION, Scenario


def test_a_saved_scenario_has_a_version_and_comes_back(tmp_path):
    made = generate(7)
    made.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["version"] == VERSION
    assert Scenario.load(tmp_path / "s.json") == made


def test_a_file_of_an_earlier_version_is_upgraded(tmp_path, monkeypatch):
    made = generate(7)
    old = {("seats" if name == "slots" else name): value for name, value in msgspec.to_builtins(made).items()}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(msgspec.ValidationError, match="seats"):
        Scenario.load(tmp_path / "old.json")
    renamed = lambda raw: {("slots" if name == "seats" else name): value for name, value in raw.items()}  # noqa: E731
    monkeypatch.setattr(module, "UPGRADES", (*module.UPGRADES, renamed))
    monkeypatch.setattr(module, "VERSION", VERSION + 1)
    assert Scenario.load(tmp_path / "old.json") == made
    made.save(tmp_path / "new.json")
    assert Scenario.load(tmp_path / "new.json") == made, "one that has the version is left alone"


def test_version_1_called_instances_nodes():
    old = {"seed": 1, "cluster": {"nodes": [{"role": "mixed"}], "policy": "load"}}
    assert module.upgrade(old) == {"seed": 1, "cluster": {"instances": [{"role": "mixed"}], "policy": "load"}}
    assert module.upgrade({"seed": 1}) == {"seed": 1}, "a plain instance has no cluster"


@pytest.mark.parametrize("policy", ["two_choices", "round_robin"])
def test_version_2_had_two_more_policies(policy):
    old = {"version": 2, "cluster": {"instances": [], "policy": policy}}
    assert module.upgrade(old) == {"cluster": {"instances": [], "policy": "load"}}
    kept = {"instances": [], "policy": "prefix"}
    assert module.upgrade({"version": 2, "cluster": kept}) == {"cluster": kept}
    assert module.upgrade({"version": 2, "seed": 1}) == {"seed": 1}


@pytest.mark.parametrize("version", [0, VERSION + 1, "1"])
def test_a_version_that_is_not_known_is_refused(tmp_path, version):
    (tmp_path / "s.json").write_text(json.dumps({"version": version, **msgspec.to_builtins(generate(7))}))
    with pytest.raises(msgspec.ValidationError, match=f"this build reads versions 1 to {VERSION}"):
        Scenario.load(tmp_path / "s.json")


DRAWN = {
    "chunk_tokens_max", "drafts_max", "new_bytes_max", "plan_bytes_max", "worker_restarts_max", "worker_kills_max",
    "requests_max", "tokens_max",
}  # fmt: skip
"""Bounds that a scenario has fields of its own for."""
RULES = {"failures_max"}
"""Numbers that are no bounds of a container."""


def bounds(config: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= bounds(value)
        elif field.name.endswith("_max") and not isinstance(value, float):
            found[field.name] = value
    return found


def test_the_bound_of_a_scenario_reaches_every_bound_of_an_instance():
    scenario = Scenario(seed=1, blocks=8, block_size=4, slots=2, tokens_per_step=8, clients=[], digests="true", bound=3)
    config, production = bounds(scenario.config()), bounds(InstanceConfig())
    assert set(config) >= {"attempts_max", "pauses_max", "sleep_orders_max", "permits_max", "digest_changes_max"}
    assert {name: value for name, value in config.items() if name not in DRAWN | RULES} == dict.fromkeys(
        set(config) - DRAWN - RULES, 3
    )
    scenario.bound = 0
    assert {name: value for name, value in bounds(scenario.config()).items() if name not in DRAWN} == {
        name: value for name, value in production.items() if name not in DRAWN
    }
