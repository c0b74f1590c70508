"""A default is said once, by the owner of the setting; `baton serve` repeats none."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from baton import config
from baton.config import EngineConfig, ServeConfig, WorkerConfig

OF_THE_MACHINE = {"blocks", "prefill_tokens_beside_decodes", "decode_gap_seconds"}
"""The machine's own values hold without a server (simulator, tests). There they are other numbers, said for another reason."""
OTHER_THINGS = {"peer"}
"""The cache service gets it from the engine, which always sends it."""


def literal_defaults() -> dict[str, list[str]]:
    """Field -> classes that give it a value of their own."""
    found: dict[str, list[str]] = {}
    nodes = [node for file in Path(config.__path__[0]).glob("*.py") for node in ast.parse(file.read_text()).body]
    for node in nodes:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, (ast.Constant, ast.Tuple)):
                assert isinstance(line.target, ast.Name)
                found.setdefault(line.target.id, []).append(node.name)
    return found


def test_no_two_classes_say_the_same_default():
    twice = {name: classes for name, classes in literal_defaults().items() if len(classes) > 1}
    assert {*twice} == OF_THE_MACHINE | OTHER_THINGS, twice


def test_what_the_server_starts_with_is_what_the_owners_say():
    engine = ServeConfig().engine()
    worker = WorkerConfig()
    for field in fields(WorkerConfig):
        if field.name == "by_device":  # a server chooses for its device, a worker without one is as it is made
            continue
        assert getattr(engine.worker, field.name) == getattr(worker, field.name), field.name
    for name in ("log_level", "log_format", "tiers", "role"):
        assert getattr(engine, name) == getattr(EngineConfig(), name), name
