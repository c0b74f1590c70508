"""`pip install baton-serve`, then `baton serve`: wheel and sdist hold everything, and what serving needs is required."""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_rig import serving
from installed import ENVIRONMENT, ROOT, build_sdist, build_wheel, install, requirements
from packaging.utils import canonicalize_name

PACKAGE = ROOT / "src" / "baton"
SMALL = ("--port", "0", "--kv-memory-gib", "0.05", "--threads", "1")
OPTIONAL = {"mooncake", "ray", "torch", "triton", "huggingface_hub", "pytest"}
"""Imported where they are there, and said to be missing where they are not."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="module")
def sdist(scratch) -> Path:
    return build_sdist(scratch)


@pytest.fixture(scope="module")
def wheel(sdist, scratch) -> Path:
    return build_wheel(sdist, scratch)


@pytest.fixture(scope="module")
def baton(wheel, scratch) -> Path:
    return install(wheel, scratch)


def data_files() -> set[str]:
    """Everything in the package that is not Python."""
    ours = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    return {f"baton/{path.relative_to(PACKAGE)}" for path in ours}


def test_wheel_and_sdist_hold_every_file_of_the_package(sdist, wheel):
    data = data_files()
    assert {"baton/py.typed", *(f"baton/api/routes/static/chat.{kind}" for kind in ("html", "css", "js"))} <= data
    assert any(name.startswith("baton/native/csrc/") for name in data)
    modules = {f"baton/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/src/")[2] for name in archive.getnames()}
    assert data | modules <= in_wheel
    assert data | modules <= in_sdist
    assert not [name for name in in_wheel if not name.startswith(("baton/", "baton_serve-"))]


def imported_packages() -> set[str]:
    """Top-level names of everything that any file of the package imports, at any depth."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"baton"}


def test_everything_that_is_imported_is_required(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    required = requirements([line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")])
    names = {canonicalize_name(each.name) for each in required}
    providers = metadata.packages_distributions()
    missing = {
        module for module in imported_packages() - OPTIONAL
        if not names & {canonicalize_name(provider) for provider in providers.get(module, [module])}
    }  # fmt: skip
    assert missing == set()
    assert not names & {canonicalize_name(module) for module in OPTIONAL}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**ENVIRONMENT, "COLUMNS": "100", "NO_COLOR": "1", **environment}
    return subprocess.run([*map(str, command)], env=given, capture_output=True, text=True, timeout=120, check=False)


def test_the_installed_command_explains_itself(baton):
    python = baton.with_name("python")
    for arguments in ([], ["serve"], ["bench", "serve"]):
        ran = run(baton, *arguments, "--help")
        assert ran.returncode == 0, ran.stderr
        assert "Example" in ran.stdout
    code = (
        "from typer.testing import CliRunner; from baton.cli.main import app\n"
        "for name in ('chat', 'run', 'models', 'simulate'):\n"
        "    ran = CliRunner().invoke(app, [name, '--help'])\n"
        "    assert (ran.exit_code, 'Example' in ran.stdout) == (0, True), name"
    )
    ran = run(python, "-P", "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert run(baton, "models").returncode == 0


def test_the_installed_command_serves(baton, tiny_model):
    with serving(tiny_model, *SMALL, command=[str(baton)], environment=ENVIRONMENT) as server:
        body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body)["usage"]["completion_tokens"] >= 1
        assert b"<html" in server.get("/").lower()
        code, err = server.interrupt()
    assert code == 0, err


def one_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 1, ran.stdout + ran.stderr
    *progress, error = ran.stderr.splitlines()
    assert all(" loading " in line for line in progress), ran.stderr
    return error


@contextmanager
def without(package: str, scratch: Path) -> Iterator[None]:
    """Somebody has removed it."""
    moved = [path for path in (scratch / "site").iterdir() if path.name.startswith(package)]
    assert moved
    for path in moved:
        path.rename(scratch / path.name)
    try:
        yield
    finally:
        for path in moved:
            (scratch / path.name).rename(path)


def test_a_hub_model_without_the_hub_package(baton, scratch):
    with without("huggingface_hub", scratch):
        assert "pip install huggingface_hub" in one_line(run(baton, "serve", "owner/model", *SMALL))


def test_torch_is_asked_for_and_not_installed(baton, tiny_model):
    assert "pip install torch" in one_line(run(baton, "serve", tiny_model, *SMALL, "--compute", "torch"))


@pytest.mark.parametrize("command", ["serve", "run"])
def test_neither_a_compiler_nor_torch(baton, tiny_model, tmp_path, command):
    arguments = ("serve", tiny_model, *SMALL) if command == "serve" else ("run", tiny_model, "Hi")
    said = one_line(run(baton, *arguments, PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path)))
    assert "install a C compiler (gcc or clang), or pip install torch" in said


def test_an_incomplete_installation_names_what_is_missing(baton, scratch, tiny_model):
    with without("orjson", scratch):
        assert "packages are missing: pip install 'orjson>=3.10'" in one_line(run(baton, "serve", tiny_model, *SMALL))
