"""The manifests of deploy/kubernetes as data: what `kubectl kustomize` renders, for the fields that they use."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from baton.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(folder.name for folder in (DEPLOY / "kubernetes" / "overlays").iterdir())
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
KEYS = {"apiVersion", "kind", "resources", "patches"}
"""Of a kustomization. Another key needs a line in `rendered`."""


def folder_of(overlay: str) -> Path:
    return DEPLOY / "kubernetes" / "overlays" / overlay


def rendered(folder: Path) -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert kustomization.keys() <= KEYS
    found: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        found += rendered(path) if path.is_dir() else [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each]
    for patch in kustomization.get("patches", ()):
        (target,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (*patch["target"].values(),)]
        for change in yaml.safe_load(patch["patch"]):
            apply(change, target)
    return found


def apply(change: dict[str, Any], document: Any) -> None:
    """One operation of RFC 6902."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
    for part in path:
        document = document[int(part) if isinstance(document, list) else part]
    value = deepcopy(change.get("value"))
    match change["op"], document:
        case "add", list():
            document.insert(len(document) if last == "-" else int(last), value)
        case "add", dict():
            document[last] = value
        case "replace", dict():
            assert last in document
            document[last] = value
        case "remove", dict():
            del document[last]
        case operation:
            raise AssertionError(operation)


def of_kind(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    """Specs by name."""
    found = [each for each in rendered(folder_of(overlay)) if each["kind"] == kind]
    assert len({each["metadata"]["name"] for each in found}) == len(found)
    return {each["metadata"]["name"]: each["spec"] for each in found}


def options(arguments: list[str]) -> dict[str, Any]:
    """What the command makes of the arguments; fails for a flag that it does not know."""
    command, *rest = arguments
    return COMMANDS[command].make_context(command, list(rest)).params
