"""`baton kv list | blocks | verify | remove`: inspects stored KV blocks, in a directory or a Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nlargest
from time import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.help import HelpfulTyper
from baton.cli.say import FAILED, Failed, bar, complaints, console, print_json

if TYPE_CHECKING:
    from baton.kvcache.storage.listing import IdentityTotals, Listing, StoredObject

app = HelpfulTyper()

HELP = """Look at KV blocks that are stored in a directory or a Redis.

That is the URL of `baton serve --kv-storage URL` (docs/caching.md); a directory may be given as it is. Servers may use the
store meanwhile: everything in it may be removed at any time, and costs no more than computing it again.

\b
Examples:
  baton kv list /var/cache/baton          how much is stored, per identity
  baton kv list redis://10.0.0.5:6379/0
  baton kv blocks /var/cache/baton        single blocks, the last used first
  baton kv verify /var/cache/baton        read everything and check it
  baton kv remove /var/cache/baton --older-than 7d
"""
LIST_HELP = """Count stored blocks and bytes, per identity.

An identity stands for one model, its weights, quantisation, data types, kernels and rank; blocks of another one are never
read. `plan` in `GET /config` of a server, and `GET /v1/cluster` of a router, show the present one (kv_identity). One that is
not used any more, as after an update, is evicted in time, or removed by `baton kv remove`.

\b
Examples:
  baton kv list /var/cache/baton
  baton kv list 'redis://10.0.0.5:6379/0?password_file=redis.key' --json
"""
BLOCKS_HELP = """List single blocks, those that were used last first.

\b
Examples:
  baton kv blocks /var/cache/baton
  baton kv blocks /var/cache/baton --limit 5 --identity 3f9a
  baton kv blocks file:/var/cache/baton --limit 0 --json
"""
VERIFY_HELP = """Read every stored block of a directory and check it: header, key, layout, length, checksum.

A server does the same for every block that it reads, and computes what is damaged again. This tells whether a disk
is going bad. Exit code 1: something is damaged.

\b
Examples:
  baton kv verify /var/cache/baton
  baton kv verify /var/cache/baton --remove
"""
REMOVE_HELP = """Remove stored blocks: all, those of an identity, or those that were not used for some time.

Files and values that are not Baton's are left alone, and so are blocks that are used meanwhile. It may be interrupted at any
time.

\b
Examples:
  baton kv remove /var/cache/baton --older-than 7d --dry-run
  baton kv remove /var/cache/baton --identity 3f9a          asks first
  baton kv remove redis://10.0.0.5:6379/0 --older-than 12h --yes
"""

URL = Annotated[str, typer.Argument(metavar="URL", help="As for --kv-storage, or a directory.", show_default=False)]
Identity = Annotated[str, typer.Option("--identity", metavar="HEX", help="Only identities that begin so (see baton kv list).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _listing(url: str) -> Listing:
    from baton.kvcache.storage.open import open_listing

    return open_listing(url)


@contextmanager
def _problems(command: str) -> Iterator[None]:
    with complaints(f"kv {command}"):
        try:
            yield
        except OSError as error:
            raise Failed(f"{error.filename}: {error.strerror}; run it as the user of the server")


def _objects(listing: Listing, identity: str, *, quiet: bool = False) -> list[StoredObject]:
    with bar("looking", quiet=quiet) as advance:
        found = listing.objects(lambda done, total: advance(done, total, ""))
        return [one for one in found if one.identity.startswith(identity)]


def _totals(found: list[StoredObject]) -> list[IdentityTotals]:
    """Totals per identity, the last used first."""
    from baton.kvcache.storage.listing import IdentityTotals

    identities: dict[str, IdentityTotals] = {}
    for one in found:
        identities.setdefault(one.identity, IdentityTotals(one.identity)).add(one)
    return sorted(identities.values(), key=lambda totals: -(totals.newest or 0.0))


@app.command("list", help=LIST_HELP)
def list_identities(url: URL, as_json: Json = False) -> None:
    with _problems("list"):
        listing = _listing(url)
        rows = _totals(_objects(listing, "", quiet=as_json))
        if as_json:
            objects, nbytes = sum(row.objects for row in rows), sum(row.nbytes for row in rows)
            print_json({"store": listing.place, "objects": objects, "nbytes": nbytes, "identities": rows})
            return
        _print_totals(rows)


def _print_totals(rows: list[IdentityTotals]) -> None:
    columns = ("identity", "objects", "size", "last used", "oldest")
    _print_table(
        columns, [(row.identity, f"{row.objects:,}", _size(row.nbytes), _age(row.newest), _age(row.oldest)) for row in rows]
    )
    console().print(f"{sum(row.objects for row in rows):,} objects, {_size(sum(row.nbytes for row in rows))}")


@app.command("blocks", help=BLOCKS_HELP)
def list_blocks(
    url: URL,
    identity: Identity = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Number of blocks to list; 0: all.")] = 20,
    as_json: Json = False,
) -> None:
    with _problems("blocks"):
        found = _objects(_listing(url), identity, quiet=as_json)
        shown = nlargest(limit or len(found), found, key=lambda one: one.used_at or 0.0)
        if as_json:
            print_json({"objects": len(found), "shown": [_as_dict(one) for one in shown]})
            return
        _print_table(
            ("key", "identity", "size", "used"),
            [(one.key[:16], one.identity, _size(one.nbytes), _age(one.used_at)) for one in shown],
        )
        if len(found) > len(shown):
            console(stderr=True).print(f"{len(found) - len(shown):,} more; --limit 0 lists all")


@app.command("verify", help=VERIFY_HELP)
def verify_blocks(
    url: URL,
    identity: Identity = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
    as_json: Json = False,
) -> None:
    from baton.kvcache.storage.file_tools import FileListing, file_fault

    with _problems("verify"):
        listing = _listing(url)
        if not isinstance(listing, FileListing):
            raise Failed("baton kv verify reads directories; a server verifies every block of a Redis that it reads")
        found = _objects(listing, identity, quiet=as_json)
        total, done = sum(one.nbytes for one in found), 0
        damaged: list[dict[str, Any]] = []
        with bar("verifying", unit="bytes", quiet=as_json) as advance:
            for one in found:
                if (fault := file_fault(one)) is not None:
                    gone = remove and listing.remove([one], lambda done, total: None) == 1
                    damaged.append({"path": one.place, "fault": fault, "removed": gone})
                done += one.nbytes
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


@app.command("remove", help=REMOVE_HELP)
def remove_blocks(
    url: URL,
    identity: Identity = "",
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Only blocks not used for 30m, 12h, 7d, 2w; a number is hours.")
    ] = "0",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    with _problems("remove"):
        seconds, listing = _seconds(older_than), _listing(url)
        before = time() - seconds
        found = [
            one for one in _objects(listing, identity) if not seconds or (one.used_at is not None and one.used_at <= before)
        ]
        if dry_run:
            _print_totals(_totals(found))
            return
        nbytes = sum(one.nbytes for one in found)
        if found and not yes:
            question = f"Remove {len(found):,} blocks ({_size(nbytes)}) from {listing.place}?"
            if not typer.confirm(question, err=True):
                raise typer.Exit(FAILED)
        with bar("removing") as advance:
            removed = listing.remove(found, lambda done, total: advance(done, len(found), ""))
        used = f"; {len(found) - removed:,} were used or removed meanwhile" if removed < len(found) else ""
        console().print(f"{removed:,} blocks removed, {_size(nbytes * removed / max(1, len(found)))}{used}")


app.command("ls", hidden=True, help=BLOCKS_HELP)(list_blocks)
app.command("stat", hidden=True, help=LIST_HELP)(list_identities)
app.command("clear", hidden=True, help=REMOVE_HELP)(remove_blocks)


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw]?)", age.strip().lower())
    if match is None:
        raise Failed(f"--older-than {age}: write a number and a unit, such as 30m, 12h, 7d or 2w")
    return float(match[1]) * UNITS[match[2] or "h"]


def _as_dict(one: StoredObject) -> dict[str, Any]:
    row = {"key": one.key, "identity": one.identity, "nbytes": one.nbytes}
    ago = None if one.used_at is None else round(max(0.0, time() - one.used_at), 1)
    return {**row, "used_seconds_ago": ago, "place": one.place}


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


def _age(at: float | None) -> str:
    if at is None:
        return "unknown"
    seconds = max(0.0, time() - at)
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
