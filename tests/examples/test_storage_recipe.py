"""The page docs/internals/adding-a-storage.md, step by step: its files in a folder, its package installed, its test run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-storage.md"


def files_of(page: str) -> dict[str, str]:
    """The blocks of code whose first line is the name of a file."""
    return dict(re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", page, re.DOTALL))


def test_the_recipe_gives_a_backend_that_passes_the_suite(tmp_path):
    files = files_of(PAGE.read_text())
    assert list(files) == ["my_storage.py", "pyproject.toml", "test_my_storage.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = tmp_path / "my_storage-0.1.0.dist-info"  # as pip would leave it
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    ((group, names),) = project["entry-points"].items()
    (info / "entry_points.txt").write_text("".join([f"[{group}]\n", *(f"{name} = {value}\n" for name, value in names.items())]))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_my_storage.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.stdout.count("PASSED") >= 12
    assert "SKIPPED" not in ran.stdout
