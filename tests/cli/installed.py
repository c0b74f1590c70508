"""Baton as pip installs it: built from its sources, in an environment with what it requires and nothing else. No network."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import wheel as wheel_tool  # noqa: E402

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def build_sdist(scratch: Path) -> Path:
    wheel_tool.copy_sources(scratch / "tree")
    (scratch / "dist").mkdir()
    return wheel_tool.package("sdist", scratch / "tree", scratch / "dist")


def build_wheel(sdist: Path, scratch: Path) -> Path:
    """From the sdist and not from the checkout: what is missing in the one would be missing in the other."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (tree,) = (scratch / "unpacked").iterdir()
    return wheel_tool.package("wheel", tree, scratch / "dist")


def requirements(lines: list[str]) -> list[Requirement]:
    """Those of a plain installation, without extras."""
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def closure(roots: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Everything that pip would install for them, of what is installed here."""
    found: dict[str, metadata.Distribution] = {}
    todo = list(roots)
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name not in found:
            found[name] = metadata.distribution(name)
            todo += requirements(found[name].requires or [])
    return found


def install(wheel: Path, scratch: Path) -> Path:
    """A fresh environment: the wheel, and links to the packages that it requires. The path of its `baton`."""
    folder, site = scratch / "venv", scratch / "site"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    quick = "--no-compile"  # of modules that no test imports
    subprocess.run([*pip, quick, str(wheel)], env=ENVIRONMENT, check=True, timeout=300)
    site.mkdir()
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = packages.glob("baton_serve-*.dist-info")
    for distribution in closure(requirements(metadata.Distribution.at(own).requires or [])).values():
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    (packages / "requirements.pth").write_text(f"{site}\n")
    return folder / "bin" / "baton"
