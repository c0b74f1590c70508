"""Hide the optional packages and programs, as on a machine that has none of them.

    BATON_HIDE=1 PYTHONPATH=tests/hidden python -m pytest

Python imports this file at the start of every process, so the processes that a test starts have nothing either. A hidden
package is not found, which is what its absence looks like to `import` and to `importlib.util.find_spec` alike.
"""

import importlib.machinery
import os
import shutil
import sys

MODULES = frozenset({"triton", "mooncake", "redis", "hiredis"})
PROGRAMS = frozenset(
    {"redis-server", "valkey-server", "mooncake_master", "chromium", "chromium-browser", "google-chrome", "npm", "node"}
)


class PathFinder(importlib.machinery.PathFinder):
    """Finds every module on sys.path except the hidden ones."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        return None if fullname.partition(".")[0] in MODULES else super().find_spec(fullname, path, target)


def hide() -> None:
    sys.meta_path[:] = [PathFinder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
    which = shutil.which
    shutil.which = lambda cmd, *rest, **names: None if cmd in PROGRAMS else which(cmd, *rest, **names)  # type: ignore[assignment]


if os.environ.get("BATON_HIDE"):
    hide()
