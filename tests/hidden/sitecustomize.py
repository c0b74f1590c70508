"""Hide the optional packages and programs, as on a machine that has none of them.

    BATON_HIDE=1 PYTHONPATH=tests/hidden python -m pytest

Python imports this file at the start of every process, so the processes that a test starts have nothing either. A hidden
package is not found, which is what its absence looks like to `import` and to `importlib.util.find_spec` alike.

transformers, the oracle of many tests, does not import without huggingface_hub: it finds it, and nobody else does.
"""

import builtins
import importlib
import importlib.machinery
import os
import shutil
import sys

MODULES = frozenset({"triton", "mooncake", "redis", "hiredis", "ray", "kubernetes_validate", "huggingface_hub"})
NEEDED_BY = {"huggingface_hub": frozenset({"huggingface_hub", "transformers", "sentence_transformers"})}
"""Packages that find a hidden one."""
PROGRAMS = frozenset(
    {"redis-server", "valkey-server", "mooncake_master", "chromium", "chromium-browser", "google-chrome", "npm", "node"}
)
_IMPORTING = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external", __name__})


class PathFinder(importlib.machinery.PathFinder):
    """Finds every module on sys.path except the hidden ones."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        package = fullname.partition(".")[0]
        if package in MODULES and is_hidden(package, importer()):
            return None
        return super().find_spec(fullname, path, target)


def is_hidden(package: str, importing: str) -> bool:
    return importing.partition(".")[0] not in NEEDED_BY.get(package, ())


def importer() -> str:
    """The module that imports, or looks for a package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _IMPORTING:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def hide() -> None:
    sys.meta_path[:] = [PathFinder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
    which = shutil.which
    shutil.which = lambda cmd, *rest, **names: None if cmd in PROGRAMS else which(cmd, *rest, **names)  # type: ignore[assignment]
    builtins.__import__ = unless_hidden(builtins.__import__)
    importlib.import_module = unless_hidden(importlib.import_module)


def unless_hidden(imported):  # type: ignore[no-untyped-def]
    """For packages that others have imported: no finder is asked for those."""

    def import_unless_hidden(name, *rest, **names):  # type: ignore[no-untyped-def]
        package = name.partition(".")[0]
        if package in NEEDED_BY and is_hidden(package, importer()):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return imported(name, *rest, **names)

    return import_unless_hidden


if os.environ.get("BATON_HIDE"):
    hide()
