"""Mutants: one-line faults of the core, each of which the rehearsal must find.

A mutant is a text replacement in one function of the core, kept as data in tests/mutants/*.toml beside the kept scenarios. It
runs in a process of its own, in which the module is loaded with that text changed; the seeds are the usual ones.
`python -m baton.sim.mutants NAME SEEDS [FILE]` is such a process. `python -m baton.sim.mutants replay FOLDER` replays all kept
scenarios: it loads the core once, and each mutant is a change of one loaded function in a forked process.

This module imports nothing of the core: unless a function is changed, the change must be in place before the core is loaded.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import tomllib
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from baton.sim.scenario import Scenario

SEEDS = 2_000
PACKAGE = Path(__file__).parent.parent
FOLDER = PACKAGE.parent.parent / "tests" / "mutants"


Seeds = Literal["instance", "tiers", "cluster", "front"]


class NoMutants(Exception):
    """The mutants are not part of an installed package; the message says where they are."""


class Mutant(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    fault: str
    "The developer's mistake in words."
    module: str
    "Module name below baton."
    old: str
    new: str
    function: str = ""
    "Qualified name of the function that contains `old` exactly once. Empty: the whole module."
    seeds: Seeds = "instance"
    """Kind of scenarios that can kill the mutant: one instance, one with a cache service, clusters, `baton serve`. Given once
    per file."""

    @property
    def file(self) -> str:
        return f"{self.module.replace('.', '/')}.py"

    @property
    def path(self) -> Path:
        return PACKAGE / self.file

    def change(self, source: str) -> str:
        """The module's source with the text replaced."""
        first, last = self._lines(source)
        lines = source.splitlines(keepends=True)
        return "".join((*lines[:first], self.change_function(source)[1], *lines[last:]))

    def change_function(self, source: str) -> tuple[str, str]:
        """The function's source before and after the change."""
        first, last = self._lines(source)
        text = "".join(source.splitlines(keepends=True)[first:last])
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name}: its text occurs {text.count(self.old)} times in {self.module} {self.function}"
            )
        return text, text.replace(self.old, self.new)

    def _lines(self, source: str) -> tuple[int, int]:
        return _lines_of(self.function, source) if self.function else (0, len(source.splitlines()))


class MutantResult(Struct):
    name: str
    file: str
    fault: str
    killed_by_seed: int | None
    seeds_run: int
    invariant: int | None
    message: str


@cache
def mutants() -> tuple[Mutant, ...]:
    """All mutants, in the order of their files."""
    if not FOLDER.is_dir():
        raise NoMutants(
            "the planted bugs are text of the source tree and no part of an installed package: run this in a checkout of Baton "
            "(make mutants)"
        )
    files = [tomllib.loads((FOLDER / f"{seeds}.toml").read_text()) for seeds in get_args(Seeds)]
    return tuple(msgspec.convert(row | {"seeds": file["seeds"]}, Mutant) for file in files for row in file["mutant"])


@cache
def _parsed(source: str) -> ast.Module:
    """A module has many mutants."""
    return ast.parse(source)


def _lines_of(function: str, source: str) -> tuple[int, int]:
    """First line of the function, and the line past its last, from 0."""
    body: list[ast.stmt] = _parsed(source).body
    for name in function.split("."):
        found = (node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
        node = next(found, None)
        if node is None:
            raise ValueError(f"there is no function {function}")
        body = node.body
    assert node is not None
    return node.lineno - 1, node.end_lineno or node.lineno


class _MutatedLoader(SourceFileLoader):
    """Loads a module from its source with one text replaced; never from or to a byte-code cache."""

    mutant: Mutant

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("not cached")

    def get_data(self, path: str) -> bytes:
        return self.mutant.change(super().get_data(path).decode()).encode()


def _loader(mutant: Mutant) -> _MutatedLoader:
    loader = _MutatedLoader(f"baton.{mutant.module}", str(mutant.path))
    loader.mutant = mutant
    return loader


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"baton.{mutant.module}"

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return spec_from_file_location(name, self._mutant.path, loader=_loader(self._mutant))


def find(name: str) -> Mutant:
    return next(mutant for mutant in mutants() if mutant.name == name)


def apply(mutant: Mutant) -> None:
    """Load the mutant instead of the module in this process. RuntimeError: the core is loaded already."""
    if any(name.startswith(("baton.core", "baton.protocol")) for name in sys.modules):
        raise RuntimeError("the core is loaded already")
    sys.meta_path.insert(0, _Finder(mutant))


def _scenario(mutant: Mutant, seed: int) -> Scenario:
    from baton.sim.run import make

    return make(seed, "instance" if mutant.seeds == "tiers" else mutant.seeds)


def hunt(mutant: Mutant, seeds: int) -> MutantResult:
    """Run seeds until one fails. The process must run the mutant."""
    from baton.sim.run import run

    for seed in range(seeds):
        scenario = _scenario(mutant, seed)
        if mutant.seeds == "tiers" and not scenario.host_blocks:
            continue
        outcome = run(scenario)
        if outcome.invariant is not None:
            return MutantResult(
                mutant.name, mutant.file, mutant.fault, seed, seed + 1, outcome.invariant, outcome.violation[:200]
            )
    return MutantResult(mutant.name, mutant.file, mutant.fault, None, seeds, None, "survived")


def run_mutants(
    names: Sequence[str] = (),
    seeds: int = SEEDS,
    jobs: int = 1,
    progress: Callable[[MutantResult], None] | None = None,
) -> list[MutantResult]:
    """Each mutant in a process of its own, `jobs` at a time."""

    def one(name: str) -> MutantResult:
        command = [sys.executable, "-m", "baton.sim.mutants", name, str(seeds)]
        ran = subprocess.run(command, capture_output=True, check=False, timeout=1800)
        if ran.returncode:
            raise RuntimeError(f"mutant {name}: {ran.stderr.decode()[-2000:]}")
        result = msgspec.json.decode(ran.stdout, type=MutantResult)
        if progress is not None:
            progress(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names or [mutant.name for mutant in mutants()]))


def keep(result: MutantResult, path: Path) -> None:
    """Shrink the scenario that killed the mutant, and write it to a file. The process must run the mutant."""
    from baton.sim.shrink import shrink

    if result.killed_by_seed is not None and result.invariant is not None:
        scenario = shrink(_scenario(find(result.name), result.killed_by_seed), result.invariant)
        scenario.note = f"kills the mutant {result.name}: {result.fault}"
        scenario.save(path)


def replay(mutant: Mutant, path: Path) -> MutantResult:
    """Whether a kept scenario still kills the mutant. The process must run the mutant."""
    from baton.sim.run import run
    from baton.sim.scenario import Scenario

    outcome = run(Scenario.load(path))
    killed = None if outcome.invariant is None else outcome.seed
    return MutantResult(mutant.name, mutant.file, mutant.fault, killed, 1, outcome.invariant, outcome.violation[:200])


def replay_all(folder: Path) -> list[MutantResult]:
    """Replays the kept scenario of every mutant."""
    from baton.sim.run import run
    from baton.sim.scenario import Scenario

    for seeds in get_args(Seeds):  # what is loaded or prepared at its first use is there when the processes are forked
        run(Scenario.load(folder / f"{next(mutant.name for mutant in mutants() if mutant.seeds == seeds)}.json"))
    return [replay_forked(mutant, folder / f"{mutant.name}.json") for mutant in mutants()]


def replay_forked(mutant: Mutant, path: Path) -> MutantResult:
    """Replays a kept scenario in a forked process, in which one function is changed. Without such a function: in a new one."""
    code = _changed_code(mutant)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            result = replay(mutant, path) if code is not None and _plant(mutant, code) else _replay_apart(mutant, path)
            os.write(writer, msgspec.json.encode(result))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        encoded = answer.read()
    os.waitpid(child, 0)
    if not encoded:
        raise RuntimeError(f"mutant {mutant.name} could not be replayed: its error is above")
    return msgspec.json.decode(encoded, type=MutantResult)


def _replay_apart(mutant: Mutant, path: Path) -> MutantResult:
    command = [sys.executable, "-m", "baton.sim.mutants", mutant.name, "replay", str(path)]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=300)
    return msgspec.json.decode(ran.stdout, type=MutantResult)


def _changed_code(mutant: Mutant) -> CodeType | None:
    """The module's code with the change. None: the change is not within the body of one function."""
    source = mutant.path.read_text()
    if not mutant.function:
        return None
    before, after = map(_signature, mutant.change_function(source))
    return _loader(mutant).source_to_code(mutant.change(source), mutant.path) if before == after != "" else None


def _plant(mutant: Mutant, code: CodeType) -> bool:
    """Gives the loaded function the changed code. False: it is not a function."""
    owner: Any = sys.modules.get(f"baton.{mutant.module}")
    for name in mutant.function.split("."):
        owner = vars(owner)[name]
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    function = owner.fget if isinstance(owner, property) else getattr(owner, "__func__", owner)
    if not isinstance(function, FunctionType):
        return False
    function.__code__ = code
    return True


def _signature(source: str) -> str:
    """The function's arguments, which are evaluated when its module is loaded. Empty: a class."""
    node = ast.parse(textwrap.dedent(source)).body[0]
    return ast.dump(node.args) if isinstance(node, ast.FunctionDef) else ""


def main(arguments: Sequence[str]) -> None:
    """NAME SEEDS [FILE]: hunt the mutant; with FILE, keep the shrunken scenario that kills it.

    NAME replay FILE: see whether a kept scenario kills it. replay FOLDER: the same for all of them, as a list.
    """
    if arguments[0] == "replay":
        sys.stdout.buffer.write(msgspec.json.encode(replay_all(Path(arguments[1]))))
        return
    mutant = find(arguments[0])
    apply(mutant)
    if arguments[1] == "replay":
        sys.stdout.buffer.write(msgspec.json.encode(replay(mutant, Path(arguments[2]))))
        return
    result = hunt(mutant, int(arguments[1]))
    if len(arguments) > 2:
        keep(result, Path(arguments[2]))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main(sys.argv[1:])
