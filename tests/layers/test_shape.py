"""Tests are where the source is. Sizes are a habit, not a fence: the three longest of each are printed, and nothing fails."""

import ast
from pathlib import Path

from .rules import SRC, nodes, sources


def test_tests_mirror_the_first_level_of_the_tree():
    tests = Path(__file__).parent.parent
    folders = {path.parent.name for path in SRC.glob("*/__init__.py")}
    assert {folder for folder in folders if not (tests / folder).is_dir()} == {"familiar"}, "its tests are in cli/"


def test_show_the_longest(capsys):
    files, functions = [], []
    for path in sources():
        source, name = path.read_text(), str(path.relative_to(SRC))
        files.append((len(source.splitlines()), name))
        for node in nodes(source):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((node.end_lineno - node.lineno + 1, f"{name}:{node.lineno} {node.name}"))
    with capsys.disabled():
        for title, found in (("functions", functions), ("files", files)):
            longest = ", ".join(f"{name} ({lines})" for lines, name in sorted(found, reverse=True)[:3])
            print(f"\nlongest {title}: {longest}", end="")
        print()
