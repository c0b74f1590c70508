"""`make test` runs everything with the optional packages hidden, and then what needs them with the packages that are there."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sitecustomize import MODULES, NEEDED_BY, PROGRAMS

HERE = Path(__file__).parent
TESTS = HERE.parent
LINES = [line.partition("::") for line in (HERE / "with_packages.txt").read_text().split()]
LISTED = [TESTS.parent / path for path, _, test in LINES if not test]
LISTED_TESTS = {(TESTS.parent / path, test) for path, _, test in LINES if test}
"""Of a file that runs many tests without the packages, those that need one."""
NEEDS_ONE = re.compile(
    r"importorskip\(\"(triton|mooncake|redis|ray|kubernetes_validate|huggingface_hub)[\".]|shutil\.which\(\"(redis-server|chromium|npm|node)\""
    r"|(from|import) (redis_server|mooncake_master|chromium|step_rig|platforms|chaos_ray)\b"
)
"""A test that is skipped where an optional package or program is missing."""


def run_hidden(code: str) -> str:
    environment = {**os.environ, "BATON_HIDE": "1", "PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_hidden_package_looks_as_if_it_were_not_installed(name):
    found = f"import importlib.util\nprint(importlib.util.find_spec({name!r}))"
    code = f"{found}\ntry: import {name}\nexcept ModuleNotFoundError as error: print(error.name)"
    assert run_hidden(code) == f"None\n{name}"


def test_tokenizers_and_the_oracle_can_do_without_what_is_hidden_from_others():
    """transformers finds huggingface_hub; who imports it then does not."""
    pytest.importorskip("transformers")
    code = "import tokenizers, transformers.utils.hub, sys\nprint('huggingface_hub' in sys.modules)\n"
    statements = ("import huggingface_hub", "from huggingface_hub.utils import logging")
    for statement in (*statements, "__import__('importlib').import_module('huggingface_hub')"):
        code += f"try: {statement}\nexcept ModuleNotFoundError as error: print(error.name)\n"
    assert run_hidden(code).split() == ["True", *["huggingface_hub"] * 3]


def test_hidden_programs_are_not_found_and_others_are():
    code = f"import shutil\nprint([shutil.which(name) for name in {sorted(PROGRAMS)}], shutil.which('sh'))"
    assert run_hidden(code) == f"{[None] * len(PROGRAMS)} {shutil.which('sh')}"


def test_every_test_that_needs_an_optional_package_is_run_with_it():
    needing = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__) and NEEDS_ONE.search(path.read_text())]
    assert needing, "the pattern finds nothing"
    partly = {path for path, _ in LISTED_TESTS}
    unlisted = [path for path in needing if not any(map(path.is_relative_to, LISTED))]
    missing = [str(path) for path in unlisted if path not in partly]
    missing += [
        f"{path}::{test}"
        for path in unlisted
        for test in that_need_one(path.read_text())
        if path in partly and (path, test) not in LISTED_TESTS
    ]
    assert missing == [], "list them in tests/hidden/with_packages.txt"


def that_need_one(source: str) -> set[str]:
    """Names of the tests that say so, or that use a function or fixture that does. All of them, where the file itself does."""
    functions = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    tests = {name for name in functions if name.startswith("test_")}
    saying = {name for name, text in functions.items() if NEEDS_ONE.search(text)}
    if not saying:
        return tests
    named = re.compile(rf"\b({'|'.join(saying)})\b")
    return {name for name in tests if named.search(functions[name])}


def test_tests_that_need_a_package_by_a_fixture_are_found():
    fixture = "def hub():\n    pytest.importorskip('it')\n\n".replace("'it'", '"redis"')
    source = f"{fixture}def test_a(hub):\n    pass\n\n\ndef test_b():\n    pass\n"
    assert that_need_one(source) == {"test_a"}
    assert that_need_one("import redis_server\n" + source.replace('redis"', 'other"')) == {"test_a", "test_b"}


def test_what_is_listed_exists():
    assert [str(path) for path in LISTED if not path.exists()] == []
    assert [f"{path}::{test}" for path, test in LISTED_TESTS if f"\ndef {test}(" not in path.read_text()] == []


@pytest.mark.skipif(not os.environ.get("BATON_HIDE"), reason="the packages are not hidden in this run")
def test_in_the_hidden_stage_this_process_has_no_optional_package():
    assert [name for name in MODULES - NEEDED_BY.keys() if importlib.util.find_spec(name)] == []
    for name in NEEDED_BY:
        with pytest.raises(ModuleNotFoundError):
            __import__(name)
