"""The running build of Baton, and its start time: sent in hellos, shown at /v1/cluster and /metrics."""

from __future__ import annotations

import json
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import Final

import baton
from baton import DISTRIBUTION, __version__
from baton.protocol.instance import Build

COMMIT_DIGITS: Final = 12
COMMIT_FILE: Final = "_commit.txt"
"""Name of a file in the package: one line, written when a wheel is built from a checkout."""
_STARTED_AT: Final = time.time()
"""Start time: this module is imported when the process starts."""


def installed_build() -> str:
    """Version, and the commit that the build or the installer has noted. Only the version in a checkout, whose files change
    while processes run."""
    return f"{__version__} {_noted_commit()[:COMMIT_DIGITS]}".strip()


@cache
def own_build() -> Build:
    return Build(__version__, commit(), _STARTED_AT)


@cache
def commit() -> str:
    """Commit of the installed package if its build (COMMIT_FILE) or its installer (PEP 610) has noted it, else of the checkout.
    Empty: unknown."""
    package = Path(baton.__file__).parent
    return (_noted_commit() or _checkout_commit(package.parents[1] / ".git"))[:COMMIT_DIGITS]


def _noted_commit() -> str:
    return _built_commit(Path(baton.__file__).parent / COMMIT_FILE) or _installed_commit()


def _built_commit(file: Path) -> str:
    try:
        noted = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return noted if re.fullmatch("[0-9a-f]{7,40}", noted) else ""


def _installed_commit() -> str:
    """By PEP 610. Found by hand: importing importlib.metadata takes tens of milliseconds, and every process comes here."""
    folder_name = f"{DISTRIBUTION.replace('-', '_')}-*.dist-info"
    try:
        installed = next((found for place in sys.path for found in Path(place).glob(folder_name)), None)
        noted = json.loads((installed / "direct_url.json").read_text("utf-8")) if installed else {}
        return str(noted["vcs_info"]["commit_id"])
    except (KeyError, TypeError, ValueError, OSError):
        return ""


def _checkout_commit(git: Path) -> str:
    """The commit of a checkout, from git's files; git itself need not be installed."""
    try:
        if git.is_file():  # a worktree's file names its folder
            git = git.parent / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
        if (shared / name).is_file():
            return (shared / name).read_text().strip()
        packed = (line.split(" ", 1) for line in (shared / "packed-refs").read_text().splitlines() if " " in line)
        return next((found for found, ref in packed if ref == name), "")
    except (OSError, UnicodeDecodeError):
        return ""


INSTALLED: Final = installed_build()
"""The build whose code this process runs. It is read at once, because an update may replace the files while the process
runs."""
