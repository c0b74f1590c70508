"""Which build of Baton this process runs, and since when: sent in hellos, shown at /v1/cluster and /metrics."""

from __future__ import annotations

import json
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import baton
from baton import __version__
from baton.protocol.node import Build

COMMIT_DIGITS: Final = 12
_STARTED_AT: Final = time.time()
"""This module is imported when the process starts."""


@cache
def own_build() -> Build:
    return Build(__version__, commit(), _STARTED_AT)


@cache
def commit() -> str:
    """Of the installed package where the installer has noted it (PEP 610), else of the checkout. Empty: not known."""
    return (_installed_commit() or _checkout_commit(Path(baton.__file__).parents[2] / ".git"))[:COMMIT_DIGITS]


def _installed_commit() -> str:
    try:
        noted = json.loads(distribution("baton").read_text("direct_url.json") or "{}")
        return str(noted["vcs_info"]["commit_id"])
    except (PackageNotFoundError, KeyError, TypeError, ValueError, OSError):
        return ""


def _checkout_commit(git: Path) -> str:
    """Reads what git has written; git itself need not be installed."""
    try:
        if git.is_file():  # a worktree: the file names its folder
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
