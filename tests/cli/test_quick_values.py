"""Plain values of options are read without pydantic, to what typer makes of them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.help import HelpfulTyper
from baton.cli.quick_values import UNUSUAL, plain_value, read_quickly

Kinds = Literal["one", "two"]


def read_by(app: typer.Typer, arguments: list[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, values and complaint of a command that has an option of every kind."""
    seen: dict[str, Any] = {}

    @app.command()
    def command(
        n: Annotated[int | None, typer.Option()] = None,
        x: Annotated[float | None, typer.Option()] = None,
        small: Annotated[int, typer.Option(min=1, max=9)] = 3,
        text: Annotated[str | None, typer.Option()] = None,
        many: Annotated[list[str] | None, typer.Option()] = None,
        kind: Annotated[Kinds, typer.Option()] = "one",
        file: Annotated[Path | None, typer.Option()] = None,
        flag: Annotated[bool | None, typer.Option("--flag/--no-flag")] = None,
        words: Annotated[list[str] | None, typer.Argument()] = None,
    ) -> None:
        seen.update(locals())

    ran = CliRunner().invoke(app, arguments, prog_name="it")
    return ran.exit_code, {name: value for name, value in seen.items() if name != "seen"}, ran.output.splitlines()[-1:]


@pytest.mark.parametrize(
    "arguments",
    [
        "", "--n 0", "--n 007", "--n 8000", "--n -3", "--n +3", "--n 1_000", "--n 1.0", "--n 1.5", "--n x", "--n ٣",
        "--n 123456789012345678901234567890", "--x 0.05", "--x 25", "--x -1", "--x 1e3", "--x .5", "--x 5.", "--x nan",
        "--x inf", "--x x", "--small 9", "--small 10", "--small 0", "--text 5", "--text ünter", "--many a --many b",
        "--kind two", "--kind three", "--kind TWO", "--file /nowhere", "--file ~", "--flag", "--no-flag", "a b c",
        "a --n 3 --flag b",
    ],
)  # fmt: skip
def test_values_are_those_of_typer(arguments):
    plain = typer.Typer(rich_markup_mode=None, add_completion=False)
    ours, theirs = (read_by(app, arguments.split()) for app in (HelpfulTyper(no_args_is_help=False), plain))
    if "unable to parse" in str(theirs[2]):  # the words are ours (help.py)
        assert "in digits" in str(ours[2])
        ours, theirs = ours[:2], theirs[:2]
    assert repr(ours) == repr(theirs)


def test_plain_values():
    assert plain_value(int, "8000") == 8000
    assert math.isclose(plain_value(float, "0.05"), 0.05)
    assert plain_value(list[str], ("a",)) == ["a"]
    assert plain_value(int, "-1") is UNUSUAL
    assert plain_value(Kinds, "three") is UNUSUAL


def test_parameters_of_another_typer_stay_as_they_are():
    others = [
        SimpleNamespace(),
        SimpleNamespace(get_runtime_param=len),
        SimpleNamespace(type_descriptor=3, get_runtime_param=len),
    ]
    before = [dict(vars(each)) for each in others]
    assert [vars(each) for each in read_quickly(others)] == before


def test_a_start_builds_no_validators():
    """They took as long as all the rest of it."""
    code = (
        "import sys; from baton.cli.main import app; app(['serve', 'no-such-model', '--port', '0', '--kv-memory-gib', '0.05'], "
        "standalone_mode=False)"
    )
    program = f"import sys\ntry:\n    {code}\nexcept BaseException as error:\n    print(type(error).__name__)\n"
    program += "print('pydantic' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "no such model" in ran.stderr
    assert ran.stdout.split()[-1] == "False"
