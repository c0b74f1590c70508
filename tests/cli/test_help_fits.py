"""The help of every command fits a terminal of 80 columns: no line is longer, no name is cut, no type stands for a value."""

from __future__ import annotations

import re
from functools import cache

import pytest
import typer
from test_settings import FIELDS

from baton.cli.help import command_help
from baton.cli.main import app
from baton.config.schema import BASIC, GROUPS

COLUMNS = 80
MANY = ("serve", "up", "router")
"""Commands with the options of a server."""


def all_commands(command, path=()):
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from all_commands(each, (*path, name))


@cache
def commands():
    return dict(all_commands(typer.main.get_command(app)))


def helped(path: tuple[str, ...], *, everything: bool = False) -> str:
    command = commands()[path]
    ctx = command.context_class(command, info_name=" ".join(("baton", *path)))
    return command_help(command, ctx, everything=True) if everything else command.get_help(ctx)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


TEXTS = [(path, False) for path in commands()] + [((name,), True) for name in MANY]


@pytest.mark.parametrize(
    ("path", "everything"), TEXTS, ids=[f"{' '.join(p) or 'baton'}{'-all' if a else ''}" for p, a in TEXTS]
)
def test_it_fits(path, everything):
    text = helped(path, everything=everything)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert not re.search(r"<(bool|int|float|str|text|path|file|list)|…|\b(INTEGER|BOOLEAN)\b", text), "values are short words"
    for line in text.splitlines():
        if line.startswith("  baton "):
            assert len(line) <= 76, "an example has room to the right"
    command = commands()[path]
    for param in command.params:
        if everything and param.param_type_name == "option" and not param.hidden:
            shown = f"--[no-]{param.opts[0][2:]}" if param.secondary_opts else param.opts[0]
            assert re.search(rf"^  .*{re.escape(shown)}\b", text, re.M), shown


@pytest.mark.parametrize("name", MANY)
def test_help_of_a_server_is_a_screen_and_the_rest_is_behind_help_all(name):
    text = helped((name,))
    assert len(text.splitlines()) < (60 if name == "serve" else 75)
    assert "--help-all" in text
    shown = re.findall(r"^  --([a-z-]+)", text, re.M)
    assert 8 <= len(shown) <= 24, "the ones that people use"
    everything = helped((name,), everything=True)
    assert len(re.findall(r"^  --", everything, re.M)) > 2 * len(shown)
    groups = re.findall(r"^([A-Z][\w ]+):$", everything, re.M)
    assert {*GROUPS} >= {*groups} - {"Examples", "Arguments", "Options"}, "none is under More"


def test_help_all_of_serve_has_every_setting():
    text = helped(("serve",), everything=True)
    for name in FIELDS:
        flag = name.replace("_", "-")
        assert name == "model" or re.search(rf"^  --(\[no-\])?{flag}\b", text, re.M), name
    assert {*BASIC} & {*FIELDS} == {name for name in BASIC if name in FIELDS}


def test_aliases_and_options_of_other_engines_are_not_shown():
    text = helped(("serve",), everything=True)
    for flag in ("--slots", "--context-tokens-max", "--ctx-size", "--trust-remote-code", "--pipeline-parallel-size", "-ngl"):
        assert flag not in text
