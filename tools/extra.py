"""Prints the requirements of one extra of pyproject.toml, one per line: `pip install -e .[NAME]` would build Baton again."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
