"""The example backend, installed as pip would leave it: its module, and what its pyproject.toml says about entry points."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_storage_by_tokens"


def install_example(folder: Path) -> Path:
    """Where `folder` is on the path of a process, `tokens:FILE` is a storage there."""
    described = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / "kv_storage_by_tokens-0.1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "kv_storage_by_tokens.py").write_bytes((EXAMPLE / "kv_storage_by_tokens.py").read_bytes())
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: 0.1.0\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in names.items())
        for group, names in described["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
