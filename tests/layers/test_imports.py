"""Imports point one way. The table is the one of docs/internals/architecture.md; this file is what holds it."""

import re
import sys

import pytest

from .rules import (
    SRC,
    circles,
    folder_circles,
    imports,
    layer_of,
    module_of,
    set_iterations,
    sources,
    two_way_pairs,
    wrong_calls,
    wrong_layers,
    wrong_modules,
)

BASE = {"protocol", "config", "errors"}

ALLOWED: dict[str, set[str] | None] = {
    "errors": set(),
    "ranges": {"errors"},
    "addresses": {"errors"},
    "cgroup": set(),
    "familiar": set(),
    "repeats": set(),
    "gguf": {"errors"},
    "config": {"addresses", "errors", "familiar", "ranges"},
    "protocol": {"errors"},
    "trust": {"addresses", "errors", "protocol"},
    "core": BASE,
    "models": BASE | {"gguf"},
    "native": {"config", "errors", "models"},
    "kvpool": {"cgroup", "errors", "protocol"},  # a leaf: worker and cache service share it and nothing else
    "grammar": BASE | {"text"},
    "worker": BASE | {"cgroup", "grammar", "kvpool", "models", "native", "text"},
    "kvcache": BASE | {"addresses", "kvpool", "repeats", "trust"},
    "text": BASE | {"gguf"},
    "api": BASE | {"grammar", "text", "observe"},
    "observe": BASE,
    "sim": BASE | {"core"},
    "runtime": BASE
    | {"addresses", "cgroup", "core", "worker", "kvcache", "kvpool", "api", "observe", "repeats", "text", "trust"},
    "llm": BASE | {"familiar", "core", "grammar", "worker", "models", "text"},  # all of it in one process
    "cli": None,  # anything
    "testing": None,  # suites for authors of plug-ins: they drive the core, the worker and the cache service
    "": set(),  # baton/__init__.py
}
"""Which subpackage may import which. A new one gets a line here, on purpose."""

IMPURE = {
    *("time", "datetime", "calendar", "sched", "random", "secrets", "uuid"),  # time and chance are arguments
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "ctypes", "platform", "signal", "atexit"),  # the OS
    *("asyncio", "threading", "_thread", "multiprocessing", "concurrent", "subprocess", "queue", "contextvars"),  # one thread
    *("socket", "select", "selectors", "ssl", "http", "urllib", "socketserver", "zmq"),  # the network
    *("logging", "warnings", "traceback"),  # facts worth telling are effects
    *("torch", "numpy", "safetensors"),  # tensors are the worker's
    *("importlib", "pickle", "marshal", "shelve", "gc", "inspect"),
}
"""Not for core. `random` may be named as a type."""

IMPURE_CALLS = {"open", "print", "input", "id", "hash", "vars", "globals", "breakpoint"}
"""IO, and what differs from one run to the next."""

TORCH_FILES = (
    *("models/decoder.py", "models/layers/*.py", "models/load.py", "models/torch_weights.py"),
    *("models/ranks.py", "worker/collective/distributed.py"),
    *("worker/attention/*.py", "worker/forward/torch_*.py", "worker/platforms/cuda.py", "worker/cuda/*.py"),
    *("worker/cuda/*/*.py", "models/encoders/torch_encoder.py", "worker/executors/torch_encoder.py"),
)
"""Which files may import torch. What a process needs of them it imports late, so that one without torch never pays for it
(test_torch_free.py)."""

UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("numpy.load", "np.load", "pickle.loads", "pickle.load"),
}


def package_of(path):
    return ".".join(["baton", *path.relative_to(SRC).parent.parts])


def offenders(paths, rule):
    """What a rule finds, by file. A rule gets the source and the package of each."""
    found = {str(path.relative_to(SRC)): rule(path.read_text(), package_of(path)) for path in paths}
    assert found
    return {name: wrong for name, wrong in found.items() if wrong}


def test_every_subpackage_has_a_line_in_the_table():
    assert {layer_of(path) for path in sources()} <= set(ALLOWED)


def test_table_points_one_way():
    """No two layers may import each other, in however many steps."""
    for start in ALLOWED:
        reached, todo = set(), [start]
        while todo:
            for layer in ALLOWED[todo.pop()] or set():
                assert layer != start, f"{start} can come back to itself"
                if layer not in reached:
                    reached.add(layer)
                    todo.append(layer)


@pytest.mark.parametrize("layer", ALLOWED)
def test_layer_imports_only_what_it_may(layer):
    paths = [path for path in sources() if layer_of(path) == layer]
    assert not offenders(paths, lambda source, package: wrong_layers(source, package, ALLOWED[layer]))


def test_core_is_pure():
    def rule(source, package):
        return wrong_modules(source, package, IMPURE, as_types={"random"}) + wrong_calls(source, IMPURE_CALLS)

    assert not offenders(sources("core"), rule)


def test_the_machines_of_the_core_do_not_learn_of_ranks():
    """A set is one worker to them. Two modules combine its messages, for engine and simulator."""
    of_ranks = ("baton.core.worker_set", "baton.core.rank_messages")
    files = [path for path in sources("core") if path.stem not in ("worker_set", "rank_messages")]
    found = [(path, name) for path in files for _, name in imports(path.read_text(), package_of(path))]
    assert not [f"{path}: {name}" for path, name in found if name.startswith(of_ranks)]


def test_core_never_iterates_a_set():
    assert not offenders(sources("core"), lambda source, _: set_iterations(source))


@pytest.mark.parametrize("layer", sorted(layer for layer in ALLOWED if (SRC / layer).is_dir()))
def test_no_file_imports_itself_by_way_of_others(layer):
    assert not circles({module_of(path): path.read_text() for path in sources(layer)})


def test_no_folder_imports_itself_by_way_of_its_neighbours():
    assert not folder_circles({module_of(path): path.read_text() for path in sources()})


def test_a_circle_of_folders_is_found():
    files = {
        "baton.core.kv.pool": "",
        "baton.core.kv.tiers": "from baton.core.engine.board import Board",
        "baton.core.engine.board": "from baton.core.kv.pool import Pool",
        "baton.core.instance": "from baton.core.engine.board import Board",
    }
    assert folder_circles(files) == ["baton.core.engine -> baton.core.kv -> baton.core.engine"]


TWO_WAY_PAIRS_MAX = 20
"""This number may only fall."""


def test_show_folders_that_use_their_subfolders_and_are_used_by_them(capsys):
    pairs = two_way_pairs({module_of(path): path.read_text() for path in sources()})
    with capsys.disabled():
        print(
            f"\nfolders and subfolders that import each other, {len(pairs)} of at most {TWO_WAY_PAIRS_MAX}: {'; '.join(pairs)}"
        )
    assert len(pairs) == TWO_WAY_PAIRS_MAX, "there are fewer: lower the number" if len(pairs) < TWO_WAY_PAIRS_MAX else pairs


def test_a_two_way_pair_is_found():
    files = {
        "baton.core.instance": "from baton.core.engine.board import Board",
        "baton.core.events": "",
        "baton.core.engine.board": "import baton.core.events",
        "baton.core.kv.deep.pool": "import baton.core.events",
        "baton.core.kv.tiers": "import baton.core.kv.deep.pool",
    }
    assert two_way_pairs(files) == ["core/engine: 1 down, 1 up"]


@pytest.mark.parametrize("layer", ["core", "protocol"])
def test_only_third_party_import_is_msgspec(layer):
    for path in sources(layer):
        for line, name in imports(path.read_text(), package_of(path)):
            top = name.split(".")[0]
            assert top in {"baton", "msgspec", *sys.stdlib_module_names}, f"{path}: line {line} imports {name}"


def test_core_and_its_neighbours_share_only_plans_and_moves():
    """architecture.md, "Folders": core and worker share StepPlan/StepResult, core and kvcache BlockMove/MoveResult."""
    assert ALLOWED["worker"].isdisjoint({"core", "kvcache"})
    assert ALLOWED["kvcache"].isdisjoint({"core", "worker"})
    assert ALLOWED["core"].isdisjoint({"worker", "kvcache", "kvpool"})


def test_the_pool_is_a_leaf_that_worker_and_cache_service_share():
    assert ALLOWED["kvpool"].isdisjoint({"worker", "kvcache", "models", "native", "runtime"})
    assert "kvpool" in ALLOWED["worker"] & ALLOWED["kvcache"]


def test_descriptors_are_passed_and_never_looked_up():
    """A process that opens another's descriptor under /proc finds whatever has that number by then."""
    assert not offenders(sources(), lambda source, _: re.findall(r"/proc/\{[^}]*\}/fd", source))


def test_torch_stays_where_it_is_needed():
    paths = [path for path in sources() if not any(path.relative_to(SRC).match(pattern) for pattern in TORCH_FILES)]
    torch = {"torch", "safetensors"}
    assert not offenders(paths, lambda source, package: wrong_modules(source, package, torch, as_types=set()))


def test_the_native_decoder_needs_numpy_and_nothing_else():
    for path in sources("native"):
        for line, name in imports(path.read_text(), package_of(path)):
            top = name.split(".")[0]
            assert top in {"baton", "numpy", *sys.stdlib_module_names}, f"{path}: line {line} imports {name}"


def test_nothing_is_ever_unpickled_or_evaluated():
    def rule(source, package):
        return wrong_modules(source, package, UNSAFE_MODULES, as_types=set()) + wrong_calls(source, UNSAFE_CALLS)

    assert not offenders(sources(), rule)


# The checker itself: planted violations are found, look-alikes are not


@pytest.mark.parametrize(
    "planted",
    [
        "import baton.worker.sampler",
        "from baton.worker import sampler",
        "from baton import worker",
        "def late():\n    from baton.kvcache.mover import Mover",
        "from ...worker import sampler",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baton.runtime.driver import Driver",
    ],
)
def test_checker_finds_an_import_of_a_wrong_layer(planted):
    assert wrong_layers(planted, "baton.core.kv", ALLOWED["core"])


@pytest.mark.parametrize(
    "fine",
    [
        "from baton.core.kv.eviction import lru",
        "from baton.protocol.ids import BlockId",
        "from baton import errors",
        "from . import eviction",
        "from ..machine import Machine",
        "from ...protocol import ids",
        "import worker",
    ],
)
def test_checker_lets_a_right_import_pass(fine):
    assert not wrong_layers(fine, "baton.core.kv", ALLOWED["core"])


def test_checker_finds_circles_also_those_for_types():
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baton.a import A"
    assert circles({"baton.a": "from baton.b import B", "baton.b": types}) == ["baton.a -> baton.b -> baton.a"]
    assert circles({"baton.a": "import baton.b", "baton.b": "from . import c", "baton.c": "def f():\n    import baton.a"})
    assert not circles({"baton.a": "import baton.b, baton.c", "baton.b": "import baton.c", "baton.c": "import json"})


def test_checker_finds_an_impure_import():
    forms = (
        "import {}",
        "import {} as harmless",
        "from {} import something",
        "import {}.inner",
        "def f():\n    import {}",
    )
    planted = [form.format(module) for module in sorted(IMPURE) for form in forms]
    assert not [each for each in planted if not wrong_modules(each, "baton.core", IMPURE, as_types={"random"})]


def test_random_is_allowed_as_a_type_and_only_so():
    as_type = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from random import Random\n"
    assert not wrong_modules(as_type, "baton.core", IMPURE, as_types={"random"})
    assert wrong_modules(as_type.replace("random", "time"), "baton.core", IMPURE, as_types={"random"})
    assert wrong_modules(as_type + "else:\n    from random import Random\n", "baton.core", IMPURE, as_types={"random"})
    assert wrong_modules("from random import Random", "baton.core", IMPURE, as_types={"random"})


@pytest.mark.parametrize(
    "planted",
    [
        "for x in {1, 2}: pass",
        "for x in set(y): pass",
        "for x in frozenset(y): pass",
        "[x for x in {a for a in b}]",
        "{x: 1 for x in set(y)}",
        "list({1, 2})",
        "tuple(set(y))",
        "next(iter({1, 2}))",
        "first, *rest = [*{1, 2}]",
        "f(*set(y))",
        "{1, 2}.pop()",
        "set(y).pop()",
        "for x in set(y) | other: pass",
        "for x in set(y).union(z): pass",
        "seen = set()\nfor x in seen: pass",
        "seen = {1}\nseen.pop()",
        "class A:\n  def __init__(self):\n    self.live = set()\n  def f(self):\n    return [x for x in self.live]",
        "class A:\n  live: set[int]\n  def f(self):\n    return list(self.live)",
        "def f(live: frozenset[int]):\n  for x in live: pass",
        "''.join({'a', 'b'})",
        "dict.fromkeys({1, 2})",
        "for i, x in enumerate(set(y)): pass",
        "queue.extend({1, 2})",
    ],
)
def test_checker_finds_an_iteration_over_a_set(planted):
    assert set_iterations(planted)


@pytest.mark.parametrize(
    "fine",
    [
        "for x in sorted({1, 2}): pass",
        "len(set(y)) == len(y)",
        "x in {1, 2}",
        "seen = set()\nif x in seen: seen.add(x)",
        "max({1, 2})",
        "{**a, 'b': 1}.pop('b')",
        "[1, 2].pop()",
        "for x in {'a': 1}: pass",
        "for x in {'a': 1}.items(): pass",
        "stop = frozenset(ids)\nany(t in stop for t in tokens)",
    ],
)
def test_checker_lets_ordered_things_pass(fine):
    assert not set_iterations(fine)


@pytest.mark.parametrize(
    "planted",
    [
        "eval('1')",
        "exec(code)",
        "torch.load(path)",
        "yaml.load(text)",
        "from torch import load",
        "from yaml import load as read",
    ],
)
def test_checker_finds_an_unsafe_call(planted):
    assert wrong_calls(planted, UNSAFE_CALLS)


@pytest.mark.parametrize("planted", ["import pickle", "from pickle import loads", "import marshal", "import cloudpickle as p"])
def test_checker_finds_an_unsafe_module(planted):
    assert wrong_modules(planted, "baton.api", UNSAFE_MODULES, as_types=set())


@pytest.mark.parametrize(
    "fine", ["model.eval()", "re.compile(x)", "safetensors.torch.load(b)", "yaml.safe_load(t)", "json.load(f)"]
)
def test_checker_lets_safe_look_alikes_pass(fine):
    assert not wrong_calls(fine, UNSAFE_CALLS)
