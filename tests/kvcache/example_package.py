"""Packages of examples/, installed as pip would leave them: the module, and the entry points of its pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def install_example(folder: Path, name: str = "kv_storage_by_tokens") -> Path:
    """A process that has `folder` on its path has the plug-in."""
    described = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_bytes((EXAMPLES / name / f"{name}.py").read_bytes())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: 0.1.0\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{entry} = {value}" for entry, value in names.items())
        for group, names in described["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
