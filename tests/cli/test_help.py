"""Every command explains itself, with examples, at once and without loading anything heavy."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import typer
from click import Context
from command_rig import baton, baton_here, said

from baton.cli.spellings import in_our_form

COMMANDS = ["", "serve", "chat", "run", "models", "bench", "bench offline", "bench latency", "bench serve", "simulate"]
COMMANDS += ["up", "router", "kv", "kv list", "kv blocks", "kv verify", "kv remove"]
HEAVY = ("torch", "numpy", "transformers", "starlette", "uvicorn", "tokenizers", "yaml")


@cache
def helped(command: str) -> subprocess.CompletedProcess[str]:
    return baton_here(*command.split(), "--help", COLUMNS="400")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_works_and_shows_examples(command):
    ran = helped(command)
    assert ran.returncode == 0, ran.stderr
    assert "Example" in ran.stdout
    assert f"baton {command}".strip() in ran.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_it_plainly(command):
    """STYLE 21 and 22: name the thing, and one way of saying "per"."""
    text = said(helped(command))
    for words in ("Line order", "Arithmetic.", "What computes", "one a core", " a line;", " a second.", "What is asked"):
        assert words not in text


def test_help_imports_nothing_heavy():
    program = f"""
import sys
from baton.cli.main import app
try:
    app(["serve", "--help"])
except SystemExit:
    pass
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip().endswith("HEAVY []")


def test_version():
    assert baton("version").stdout.startswith("baton ")


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("--kv-dtipe", "--kv-cache-dtype"),  # near a former name
        ("--no-webuj", "--no-chat-page"),  # near llama.cpp's
        ("--enable-lor", ""),  # near an option that is refused
        ("--max-length", ""),  # click alone suggests --max-model-len and two others
        ("--no-such-thing", ""),
    ],
)
def test_suggestions_are_close_and_of_use(typed, suggested):
    ran = baton_here("serve", typed)
    assert ran.returncode == 2
    assert ("Possible" in said(ran)) is bool(suggested)
    assert suggested in said(ran)


def test_words_behind_two_dashes_are_left_alone():
    """A prompt may begin with dashes. `baton run` takes the second word as one."""
    from baton.cli.main import app

    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    words = ["smollm2", "--max_tokens", "5", "--", "--a_prompt"]
    assert in_our_form(run, Context(run), words) == ["smollm2", "--max-tokens", "5", "--", "--a_prompt"]


def test_an_unknown_option_is_answered_with_a_near_one():
    ran = baton("serve", "--max-model-leng", "5")
    assert ran.returncode == 2
    assert "--max-model-len" in said(ran)
