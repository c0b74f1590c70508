"""Digests of what the GPU's kernels make of small models (golden_cases.py), and the file of them.

python tests/gpu/golden_on_gpu.py                prints the digests of this GPU
python tests/gpu/golden_on_gpu.py FILE           writes them to FILE too (golden_cuda.json): new cases under the number that is
                                                 there, other bits of an old case under the next number
python tests/gpu/golden_on_gpu.py FILE CASE ...  takes these cases only
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from golden_cases import CASES, NUMBERS, Gpu, Place, digest_of_rank
from golden_model import numbers_without_bits, with_digests

GOLDEN = Path(__file__).with_name("golden_cuda.json")
AT_ONCE = 12
"""Cases that are computed at the same time: most of the time is spent in compilers."""


def digest_of(name: str, place: Place | None = None) -> str:
    return CASES[name].run(CASES[name], place or Gpu())


# The file


def gpu_key() -> str:
    import torch

    from baton.worker.cuda.libraries import library_versions

    return f"{torch.cuda.get_device_name()} {library_versions()}"


def written(path: Path = GOLDEN) -> dict[str, list[dict[str, Any]]]:
    """Of each GPU with its libraries, and each kind of case (NUMBERS), every arithmetic that it had, the last one last."""
    return json.loads(path.read_text()) if path.exists() else {}


def kind_of(key: str) -> str:
    return next(kind for kind in reversed(NUMBERS) if key.endswith(kind))


def missing(gpu: str) -> list[str]:
    """Cases without a digest of this GPU with its libraries."""
    found = {name for kind in NUMBERS for entry in written().get(gpu + kind, [])[-1:] for name in entry["digests"]}
    return [name for name in CASES if name not in found]


def with_some_digests(entries: list[dict[str, Any]], found: dict[str, str], number: int) -> list[dict[str, Any]]:
    """With those that are there so far; the others are as they were, unless bits have changed. number: of the first ones."""
    if not entries:
        return [{"arithmetic": number, "digests": found}]
    made = with_digests(entries, found)
    if len(made) == len(entries):
        others = {name: value for name, value in entries[-1]["digests"].items() if name in CASES}
        made[-1] = {**made[-1], "digests": {**others, **found}}
    return made


def wrong_numbers(written: dict[str, list[dict[str, Any]]]) -> list[str]:
    """As numbers_without_bits. The first digests of a GPU may have any number: that of the day on which they were taken."""
    from_one = {
        key: [{**entry, "arithmetic": entry["arithmetic"] - entries[0]["arithmetic"] + 1} for entry in entries]
        for key, entries in written.items()
    }
    return numbers_without_bits(from_one)


# The command


def digests(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """As they come; empty for a case that failed. A process for each case."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        children = {threads.submit(_digest_of_child, name): name for name in names}
        for child in as_completed(children):
            yield children[child], child.result()


def _digest_of_child(name: str) -> str:
    child = subprocess.run([sys.executable, __file__, "--case", name], stdout=subprocess.PIPE, text=True, timeout=600)
    return child.stdout.split()[-1] if child.returncode == 0 else ""


def place_named(name: str) -> Place:
    if name == Gpu.name:
        return Gpu()
    from golden_interpreted import Interpreter

    return Interpreter()


def main() -> int:
    match sys.argv[1:]:
        case ["--case", name]:
            print(digest_of(name))
            return 0
        case ["--rank", place, name, folder, rank]:
            print(digest_of_rank(CASES[name], place_named(place), folder, int(rank)))
            return 0
        case [path, *names]:
            files = [Path(path)]
        case _:
            files, names = [], []
    gpu, before = gpu_key(), written()
    made, found, failed = dict(before), dict[str, dict[str, str]](), []
    for name, value in digests(names or CASES):
        print(gpu, "|", name, "|", value or "FAILED", flush=True)
        if not value:
            failed.append(name)
            continue
        kind = CASES[name].kind
        key = gpu + kind
        of_kind = found.setdefault(key, {})
        of_kind[name] = value
        made[key] = with_some_digests(before.get(key, []), of_kind, NUMBERS[kind])
        for path in files:  # again after each: it may be all that there is time for
            path.write_text(json.dumps(made, indent=1) + "\n")
    raised = [key for key, entries in made.items() if entries[-1]["arithmetic"] != NUMBERS[kind_of(key)]]
    print(f"{sum(map(len, found.values()))} cases; failed: {failed or 'none'}; other bits than before: {raised or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
