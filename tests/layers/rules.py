"""Reads source with `ast` and says what is wrong with it, as a list of sentences. Nothing is imported or run."""

from __future__ import annotations

import ast
import gc
from functools import cache
from itertools import takewhile
from pathlib import Path

import baton

SRC = Path(baton.__file__).parent


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a file. Several rules read each file: it is parsed and walked once, and the garbage collector does not go
    through the trees of all files again and again."""
    gc.disable()
    try:
        return tuple(ast.walk(ast.parse(source)))
    finally:
        gc.freeze()
        gc.enable()


def sources(layer: str = "") -> list[Path]:
    """Files of a subpackage or of a module at the top; all of them, if none is named."""
    top = SRC / layer
    return sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]


def layer_of(path: Path) -> str:
    """`core` for core/kv/eviction.py, `gguf` for gguf.py, "" for baton/__init__.py."""
    first = path.relative_to(SRC).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


# Imports


@cache
def imports(source: str, package: str, *, types_too: bool = True) -> tuple[tuple[int, str], ...]:
    """(line, absolute dotted name) of everything that is imported, at any depth.

    `package` is the package that the file is in, for relative imports. `types_too=False` leaves out what stands under
    `if TYPE_CHECKING`: it is never imported when the program runs.
    """
    skipped: set[ast.AST] = set()
    if not types_too:
        for node in nodes(source):
            if isinstance(node, ast.If) and _name(node.test).split(".")[-1] == "TYPE_CHECKING":
                skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import) and node not in skipped:
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return tuple(found)


def wrong_layers(source: str, package: str, allowed: set[str] | None) -> list[str]:
    """Imports of baton subpackages that are not in `allowed` (None: every one is). A layer may import itself."""
    own = f"{package}.".split(".")[1]
    found = []
    for line, name in imports(source, package):
        parts = name.split(".")
        if parts in (["baton", "__version__"], ["baton", "DISTRIBUTION"]):
            continue
        if parts[0] == "baton" and allowed is not None and len(parts) > 1 and parts[1] not in {*allowed, own}:
            found.append(f"line {line} imports {name}")
    return found


def wrong_modules(source: str, package: str, forbidden: set[str], as_types: set[str]) -> list[str]:
    """Imports of forbidden modules; those in `as_types` may stand under `if TYPE_CHECKING`."""
    found = []
    at_run_time = imports(source, package, types_too=False)
    for line, name in imports(source, package):
        top = name.split(".")[0]
        if top in forbidden and not (top in as_types and (line, name) not in at_run_time):
            found.append(f"line {line} imports {name}")
    return found


# Calls


def _name(node: ast.AST) -> str:
    """`torch.load` for that expression, "" for anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def wrong_calls(source: str, forbidden: set[str]) -> list[str]:
    """Calls of these names, dotted or bare, and imports of them by name."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and _name(node.func) in forbidden:
            found.append(f"line {node.lineno} calls {_name(node.func)}")
    return found + [f"line {line} imports {name}" for line, name in imports(source, "") if name in forbidden]


# Sets: their order comes from memory addresses and hash seeds

KEEPS_ORDER = {"list", "tuple", "iter", "next", "enumerate", "zip", "map", "filter", "deque", "dict.fromkeys", "count", "chain"}


def set_iterations(source: str) -> list[str]:
    """Places where the order of a set could get out. Membership, len, sorted, min, max, any, all are fine."""
    named = _names_of_sets(source)

    def is_set(node: ast.AST) -> bool:
        if isinstance(node, (ast.Set, ast.SetComp)):
            return True
        if isinstance(node, ast.Call):
            inner = node.func
            of_set = isinstance(inner, ast.Attribute) and is_set(inner.value)
            return _name(inner) in ("set", "frozenset") or (of_set and inner.attr in SET_METHODS)
        if isinstance(node, ast.BinOp):
            return is_set(node.left) or is_set(node.right)
        if isinstance(node, ast.IfExp):
            return is_set(node.body) or is_set(node.orelse)
        return _last_name(node) in named

    found = []
    for node in nodes(source):
        if isinstance(node, (ast.For, ast.comprehension)) and is_set(node.iter):
            found.append(f"line {node.iter.lineno} iterates a set")
        elif isinstance(node, ast.Starred) and is_set(node.value):
            found.append(f"line {node.lineno} unpacks a set")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args and is_set(node.func.value):
                found.append(f"line {node.lineno} pops from a set")
            orders = _name(node.func) in KEEPS_ORDER or getattr(node.func, "attr", "") in ("extend", "join", "fromkeys")
            if orders and any(is_set(argument) for argument in node.args):
                found.append(f"line {node.lineno} puts a set in order")
    return found


SET_METHODS = {"union", "intersection", "difference", "symmetric_difference", "copy"}


def _last_name(node: ast.AST) -> str:
    """`stop_ids` for self.stop_ids and for stop_ids."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names_of_sets(source: str) -> set[str]:
    """Names and attributes that are assigned or annotated as sets, anywhere in the file."""
    named: set[str] = set()
    for node in nodes(source):
        match node:
            case ast.Assign(targets=targets, value=value) if _makes_set(value):
                named |= {_last_name(target) for target in targets}
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                if _is_set_type(annotation) or (value is not None and _makes_set(value)):
                    named.add(_last_name(target))
            case ast.arg(arg=name, annotation=annotation) if annotation is not None and _is_set_type(annotation):
                named.add(name)
    return named - {""}


def _makes_set(value: ast.AST) -> bool:
    return isinstance(value, (ast.Set, ast.SetComp)) or (
        isinstance(value, ast.Call) and _name(value.func) in ("set", "frozenset")
    )


def _is_set_type(annotation: ast.AST) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return _last_name(base) in ("set", "frozenset", "Set", "AbstractSet", "MutableSet", "FrozenSet")


# Circles


def module_of(path: Path) -> str:
    """`baton.core.kv.eviction` for that file, `baton.core` for its __init__.py."""
    return ".".join(["baton", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def circles(modules: dict[str, str]) -> list[str]:
    """Modules that come back to themselves by imports, however many steps it takes. Those for types count too: a reader who
    must know both files to understand either does not care when they are loaded. `modules`: source by dotted name."""
    return _ways_back(_imported_modules(modules))


def folder_circles(modules: dict[str, str]) -> list[str]:
    """Folders with the same parent that come back to themselves by imports of their files. A folder's own files may use its
    subfolders and be used by them: they are the floor below or the roof above."""
    imported: dict[str, set[str]] = {}
    for module, names in _imported_modules(modules).items():
        for name in names:
            ours, theirs = module.split("."), name.split(".")
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            if shared < min(len(ours), len(theirs)) - 1:  # neither side is a file of the shared folder
                folder, other = ".".join(ours[: shared + 1]), ".".join(theirs[: shared + 1])
                imported.setdefault(folder, set()).add(other)
                imported.setdefault(other, set())
    return _ways_back({folder: sorted(others) for folder, others in imported.items()})


def two_way_pairs(modules: dict[str, str]) -> list[str]:
    """Folders whose own files import a subfolder that imports own files of theirs: the roof and the floor of the subfolder are
    in one folder. `core/engine: 14 down, 10 up`."""
    packages = {module.rpartition(".")[0] for module in modules}
    down: dict[str, int] = {}
    up: dict[str, int] = {}
    for module, names in _imported_modules(modules).items():
        for name in names:
            ours, theirs = (each if each in packages else each.rpartition(".")[0] for each in (module, name))
            parent, child, ways = (ours, theirs, down) if theirs.startswith(f"{ours}.") else (theirs, ours, up)
            if child.startswith(f"{parent}."):
                place = ".".join(child.split(".")[: parent.count(".") + 2])
                ways[place] = ways.get(place, 0) + 1
    pairs = sorted(down.keys() & up.keys())
    return [f"{pair.partition('.')[2].replace('.', '/')}: {down[pair]} down, {up[pair]} up" for pair in pairs]


def _imported_modules(modules: dict[str, str]) -> dict[str, list[str]]:
    imported: dict[str, list[str]] = {}
    for module, source in modules.items():
        names = {name for _, name in imports(source, module.rpartition(".")[0])}
        names |= {name.rpartition(".")[0] for name in names}
        imported[module] = sorted(name for name in names & modules.keys() - {module} if not module.startswith(f"{name}."))
    return imported


def _ways_back(imported: dict[str, list[str]]) -> list[str]:
    return sorted({" -> ".join(way) for start in imported if (way := _way_back(start, imported)) is not None})


def _way_back(module: str, imported: dict[str, list[str]]) -> list[str] | None:
    """The shortest, for whoever has to cut it. Told once for each circle: by the first of its modules."""
    ways, seen = [[module]], {module}
    for way in ways:
        for following in imported[way[-1]]:
            if following == module:
                return [*way, module] if module == min(way) else None
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return None
