"""At rest nothing is left: every container of every object of the core is empty, except a named few with a bound.

The check walks all attributes, and objects inside containers, so it covers containers that did not exist when it was written:
new code either empties a container, or names it and its bound here. At rest every instance is checked, and what combines the
messages of its ranks; by cluster/rest.py every router, and the front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any, Final, get_args

from baton.config.values import DRAFTS_MAX
from baton.core.engine.stats import HeldBack
from baton.core.events import Event
from baton.core.instance import Instance
from baton.core.rank_messages import CacheRanks, WorkerRanks
from baton.errors import InvariantBroken
from baton.protocol.moves import MoveKind
from baton.protocol.request import FinishReason, RefusalReason

Container = dict[Any, Any] | list[Any] | deque[Any] | set[Any] | bytearray

STALE: Final = 65
"""A heap with lazy deletion is rebuilt when it has more than 64 stale entries, and as many again as current ones."""

Place = tuple[str, str]
"""Name of a container: a class and an attribute."""
Bound = Callable[[Any], int]
"""Maximum of entries in the container, by the object that has it."""


def _device(holder: Any) -> int:
    return int(holder.total)


def _cached(cache: Any) -> int:
    return int(cache.pool.total)


BOUNDED: Final[dict[tuple[str, str], Bound]] = {
    # Per block of the device
    **{("BlockPool", name): _device for name in ("_free", "_requests", "_moves", "_cached", "_generation")},
    **{
        ("PrefixCache", name): _cached
        for name in ("_block_of", "_key_of", "_parent", "_children", "_depth", "_last_used", "_hits")
    },
    ("CacheDigest", "_changes"): lambda digest: 2 * digest._changes_max,
    ("CacheDigest", "_held"): lambda _: 2**31,  # as large as the tiers (69)
    ("PrefixCache", "_heap"): lambda cache: 2 * cache.pool.idle + STALE,
    ("TokenLinks", "_of_device"): lambda links: links._cache.pool.total,
    # Per block of the host
    **{("HostTier", name): _device for name in ("_free", "_block_of", "_unstored", "_key_of", "_pins", "_writing", "_stored")},
    ("TokenLinks", "_of_host"): lambda links: links._host.total,
    # Per slot
    **{("SlotTable", name): _device for name in ("_free", "slot_owners", "incarnations")},
    # Heaps with lazy deletion
    **dict.fromkeys((("WaitingQueue", "_heap"), ("Intake", "_deadlines"), ("Loader", "_unasked")), lambda _: STALE),
    # Fixed sizes
    ("Instance", "_handlers"): lambda _: len(get_args(Event)),
    ("Tiers", "rates"): lambda _: len(get_args(MoveKind)),
    ("Stats", "accepted_drafts"): lambda _: DRAFTS_MAX,
    ("Stats", "ended"): lambda _: len(FinishReason),
    ("Stats", "refused"): lambda _: len(get_args(RefusalReason)),
    ("Stats", "held_back"): lambda _: len(get_args(HeldBack)),
    ("HandoffChunks", "_prices"): lambda _: 31,  # by the number of bits of a step's tokens
    # Kept on purpose
    ("HandoffEnds", "_attempts"): lambda ends: ends._attempts_max,
    ("WorkerWatch", "_kills"): lambda watch: watch._config.worker_kills_max + 1,
}
NAMES_OBJECTS: Final = (("Tiers", "rates"), ("WaitingQueue", "_heap"), ("Loader", "_unasked"))
"""Containers that may name sequences that have ended, until they are rebuilt."""
STALE_OBJECTS: Final = NAMES_OBJECTS[1:]


def check_rest(instance: Instance) -> None:
    check_empty(instance, BOUNDED, NAMES_OBJECTS, STALE_OBJECTS)


def check_ranks_rest(messages: WorkerRanks | CacheRanks, ranks: int, coming: int) -> None:
    """No answer waits for those of other ranks, but for as many as are still `coming`."""
    per_rank = ("WorkerRanks", "_pongs_of"), ("CacheRanks", "_stats")
    waiting = ("StepDigests", "_answers"), ("RankAnswers", "_open")
    check_empty(messages, dict.fromkeys(per_rank, lambda _: ranks) | dict.fromkeys(waiting, lambda _: coming), (), ())


def check_empty(
    root: object, bounded: Mapping[Place, Bound], names_objects: Collection[Place], stale: Collection[Place]
) -> None:
    """9, 49: nothing is left of requests, and containers that are kept on purpose are within their bound. `stale`: containers
    with objects that have ended; these are not walked."""
    for owner, name, container in containers(root, stale):
        place = (type(owner).__name__, name)
        bound = bounded[place](owner) if place in bounded else 0
        if len(container) > bound:
            text = f"{place[0]}.{name} has {len(container)} entries at rest, and may have {bound}"
            raise InvariantBroken(text, invariant=49 if bound else 9)
        if place not in names_objects and any(_is_of_core(part) for entry in container for part in _parts(container, entry)):
            raise InvariantBroken(f"{place[0]}.{name} refers to an object of the core at rest", invariant=9)


def containers(root: object, stale: Collection[Place] = ()) -> Iterator[tuple[object, str, Container]]:
    """All containers of all objects of the core reachable by attributes, or inside containers: owner, name, container."""
    seen: dict[int, object] = {id(root): root}
    found: deque[object] = deque([root])
    while found:
        owner = found.popleft()
        for name, value in _attributes(owner):
            if isinstance(value, (dict, list, deque, set, bytearray)):
                yield owner, name, value
            if (type(owner).__name__, name) in stale:
                continue
            for inner in _objects(value):
                if id(inner) not in seen:
                    seen[id(inner)] = inner
                    found.append(inner)


def _objects(value: object) -> Iterator[object]:
    """The objects of the core that this value is or contains, at any depth."""
    if _is_of_core(value):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _objects(pair)
    elif isinstance(value, (list, deque, set, tuple)):
        for entry in value:
            if not isinstance(entry, (int, bytes, str)):
                yield from _objects(entry)


def _attributes(owner: object) -> Iterator[tuple[str, object]]:
    slots = [name for cls in type(owner).__mro__ for name in getattr(cls, "__slots__", ())]
    for name in (*slots, *getattr(owner, "__dict__", ())):
        if hasattr(owner, name):
            yield name, getattr(owner, name)


def _is_of_core(value: object) -> bool:
    """Whether this is an object with its own state: no number, tuple or string."""
    return type(value).__module__.startswith("baton.core") and not isinstance(value, (tuple, Enum, type))


def _parts(container: Container, entry: object) -> Iterator[object]:
    yield entry
    value = container[entry] if isinstance(container, dict) else entry
    yield value
    if isinstance(value, tuple):
        yield from value
