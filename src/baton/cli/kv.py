"""`baton kv ls | stat | verify | clear`: inspects a directory of stored KV blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nlargest
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.help import HelpfulTyper
from baton.cli.say import FAILED, Advance, Failed, bar, complaints, console, print_json

if TYPE_CHECKING:
    from baton.kvcache.storage.file_names import Entry
    from baton.kvcache.storage.file_tools import LayoutTotals

app = HelpfulTyper()

HELP = """Look at KV blocks that are stored in a directory.

That is the DIR of `baton serve --kv-storage file:DIR` (docs/caching.md). A server may be using it meanwhile: everything in
it may be removed at any time, and costs no more than computing it again.

\b
Examples:
  baton kv stat /var/cache/baton          how much is stored, per model
  baton kv ls /var/cache/baton            what was used last
  baton kv verify /var/cache/baton        read everything and check it
  baton kv clear /var/cache/baton         remove everything
"""
LS_HELP = """List stored blocks, those that were used last first.

\b
Examples:
  baton kv ls /var/cache/baton
  baton kv ls /var/cache/baton --limit 5 --layout 3f9a
  baton kv ls file:/var/cache/baton --limit 0 --json
"""
STAT_HELP = """Count stored blocks and bytes, per layout.

A layout stands for one model, its weights, data types and rank; blocks of another one are never read. One that is not used
any more is evicted in time, or removed by `baton kv clear --layout`.

\b
Examples:
  baton kv stat /var/cache/baton
  baton kv stat /var/cache/baton --json
"""
VERIFY_HELP = """Read every stored block and check it: header, key, layout, length, checksum.

A server does the same for every block that it reads, and computes what is damaged again. This tells whether a disk
is going bad. Exit code 1: something is damaged.

\b
Examples:
  baton kv verify /var/cache/baton
  baton kv verify /var/cache/baton --remove
"""
CLEAR_HELP = """Remove stored blocks. Files that are not ours are left alone.

\b
Examples:
  baton kv clear /var/cache/baton                       asks first
  baton kv clear /var/cache/baton --yes --older-than 24
  baton kv clear /var/cache/baton --layout 3f9a         one model's blocks
"""

Place = Annotated[str, typer.Argument(metavar="DIR", help="Directory, or file:DIR as for --kv-storage.", show_default=False)]
Layout = Annotated[str, typer.Option("--layout", metavar="HEX", help="Only layouts whose name begins so (see baton kv stat).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _directory(place: str) -> str:
    from baton.kvcache.storage.files import directory_of
    from baton.kvcache.storage.url import parse_url

    if "://" in place and not place.startswith("file:"):
        raise Failed(
            f"baton kv looks at directories; for {place.partition(':')[0]} use the store's own tools (docs/caching.md)"
        )
    root = directory_of(parse_url(place)) if place.startswith("file:") else Path(place).expanduser().absolute()
    if not root.is_dir():
        raise Failed(f"{root} is no directory; give the DIR of --kv-storage file:DIR")
    return str(root)


@contextmanager
def _problems(command: str) -> Iterator[None]:
    with complaints(f"kv {command}"):
        try:
            yield
        except OSError as error:
            raise Failed(f"{error.filename}: {error.strerror}; run it as the user of the server")


def _entries(root: str, layout: str, advance: Advance) -> Iterator[Entry]:
    from baton.kvcache.storage.file_tools import walk

    for folder, found in walk(root):
        advance(folder + 1, 256, "")
        yield from (entry for entry in found if entry.layout.startswith(layout))


@app.command("ls", help=LS_HELP)
def list_blocks(
    place: Place,
    layout: Layout = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Number of blocks to list; 0: all.")] = 20,
    as_json: Json = False,
) -> None:
    with _problems("ls"):
        with bar("looking", quiet=as_json) as advance:
            found = list(_entries(_directory(place), layout, advance))
        shown = nlargest(limit or len(found), found, key=lambda entry: entry.used_at)
        if as_json:
            print_json({"objects": len(found), "shown": [_as_dict(entry) for entry in shown]})
            return
        _print_table(
            ("key", "layout", "size", "used"),
            [(entry.key[:16], entry.layout, _size(entry.nbytes), _age(entry.used_at)) for entry in shown],
        )
        if len(found) > len(shown):
            console(stderr=True).print(f"{len(found) - len(shown):,} more; --limit 0 lists all")


@app.command("stat", help=STAT_HELP)
def count_blocks(place: Place, as_json: Json = False) -> None:
    from baton.kvcache.storage.file_tools import LayoutTotals

    with _problems("stat"):
        root = _directory(place)
        layouts: dict[str, LayoutTotals] = {}
        with bar("looking", quiet=as_json) as advance:
            for entry in _entries(root, "", advance):
                layouts.setdefault(entry.layout, LayoutTotals(entry.layout)).add(entry)
        rows = sorted(layouts.values(), key=lambda totals: -totals.newest)
        objects, nbytes = sum(row.objects for row in rows), sum(row.nbytes for row in rows)
        if as_json:
            print_json({"directory": root, "objects": objects, "nbytes": nbytes, "layouts": rows})
            return
        _print_table(("layout", "objects", "size", "last used", "oldest"), [_totals_row(row) for row in rows])
        console().print(f"{objects:,} objects, {_size(nbytes)}")


def _totals_row(row: LayoutTotals) -> tuple[str, ...]:
    return row.layout, f"{row.objects:,}", _size(row.nbytes), _age(row.newest), _age(row.oldest)


@app.command("verify", help=VERIFY_HELP)
def verify_blocks(
    place: Place,
    layout: Layout = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
    as_json: Json = False,
) -> None:
    from baton.kvcache.storage import file_tools

    with _problems("verify"):
        root = _directory(place)
        with bar("looking", quiet=as_json) as advance:
            found = list(_entries(root, layout, advance))
        total, done = sum(entry.nbytes for entry in found), 0
        damaged: list[dict[str, Any]] = []
        with bar("verifying", unit="bytes", quiet=as_json) as advance:
            for entry in found:
                fault = file_tools.file_fault(entry)
                if fault is not None:
                    damaged.append({"path": entry.path, "fault": fault, "removed": remove and file_tools.remove(entry)})
                done += entry.nbytes
                advance(done, total, f"{len(damaged)} damaged")
        if as_json:
            print_json({"objects": len(found), "nbytes": total, "damaged": damaged})
        else:
            _print_table(
                ("damaged file", "what is wrong", "removed"), [(row["path"], row["fault"], row["removed"]) for row in damaged]
            )
            console().print(f"{len(found):,} objects, {_size(total)}, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(FAILED)


@app.command("clear", help=CLEAR_HELP)
def clear_blocks(
    place: Place,
    layout: Layout = "",
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="HOURS", min=0, help="Only blocks that were not used for so long.")
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    from baton.kvcache.storage import file_tools

    with _problems("clear"):
        root, before = _directory(place), time() - older_than * 3600
        with bar("looking") as advance:
            found = [entry for entry in _entries(root, layout, advance) if entry.used_at <= before or not older_than]
        nbytes = sum(entry.nbytes for entry in found)
        if found and not yes and not typer.confirm(f"Remove {len(found):,} blocks ({_size(nbytes)}) from {root}?", err=True):
            raise typer.Exit(FAILED)
        removed = 0
        with bar("removing") as advance:
            for place_, entry in enumerate(found, 1):
                removed += file_tools.remove(entry)
                advance(place_, len(found), "")
        console().print(f"{removed:,} blocks removed, {_size(nbytes)}")


def _as_dict(entry: Entry) -> dict[str, Any]:
    row = {"key": entry.key, "layout": entry.layout, "nbytes": entry.nbytes}
    return {**row, "used_seconds_ago": round(max(0.0, time() - entry.used_at), 1), "path": entry.path}


def _print_table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    from rich.table import Table

    if rows:
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*("yes" if cell is True else "no" if cell is False else str(cell) for cell in row))
        console().print(table)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _age(at: float) -> str:
    seconds = max(0.0, time() - at)
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
