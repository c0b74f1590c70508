"""At rest a router knows its instances, and neither it nor a front any request: the walk of sim/rest.py, with their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from baton.config import RouterConfig
from baton.core.cluster.request_queue import STALE_MAX
from baton.core.cluster.router import Router
from baton.core.delivery.front import FrontEvent, FrontMachine
from baton.errors import InvariantBroken
from baton.sim.rest import Bound, Place, check_empty

FIXED_MAX: Final = 64
"""Tables whose keys are constants of the source: handlers, roles, reasons, outcomes."""

PER_INSTANCE: Final[tuple[Place, ...]] = (
    *(("Membership", name) for name in ("instances", "names", "with_paths", "_capacities", "_stalled")),
    *(("Roster", name) for name in ("instances", "_touched", "_by_time", "_urgent", "_least_urgent", "_classes")),
    *(("PrefixIndex", name) for name in ("_known", "_numbers")),
    *(("InstanceGroup", name) for name in ("by_load", "by_room", "entries")),
    ("Sizes", "capacities"),
    ("Paths", "_failed"),
)
ONCE_KNOWN: Final[tuple[Place, ...]] = (
    ("Membership", "_losses"),
    ("Membership", "_gone"),
    ("RequestQueue", "_sizes"),
    ("PrefixIndex", "_bits_free"),
    ("PrefixIndex", "_debtors"),
)
"""Tables with an entry per instance. Instances that left and may come back count too, and sizes as of the last placement
pass."""
LAZY: Final[tuple[Place, ...]] = (
    ("Alarms", "_heap"),
    ("RequestQueue", "_lanes"),
    ("RequestQueue", "_waiters"),
    ("RequestQueue", "_cached"),
)
"""Tables of requests. Entries of ended requests are removed when there are too many."""
FIXED: Final[tuple[Place, ...]] = (
    *(("RouterStats", name) for name in ("broken_off", "handoff_ends", "losses", "refused", "turned_away")),
    *(("Router", name) for name in ("_handlers", "_message_handlers")),
    *(("Roster", name) for name in ("_found", "_groups", "_sizes", "prefills")),
    ("Coordinator", "_actions"),
    ("Membership", "_modes"),
)
STALE: Final[tuple[Place, ...]] = (("Alarms", "_heap"),)
KEYS: Final[tuple[Place, ...]] = tuple(("KnownKeys", name) for name in ("keys", "guesses", "earlier"))
"""Tables of cached blocks of one instance."""
NAMES_OBJECTS: Final[tuple[Place, ...]] = (*PER_INSTANCE, *FIXED, *STALE, ("Placement", "_counts_of"))


def check_router_rest(router: Router, config: RouterConfig) -> None:
    check_empty(router, bounds_of(router, config), NAMES_OBJECTS, STALE)
    for instance in router.membership.instances.values():
        if instance.assigned or instance.over_capacity:
            raise InvariantBroken(f"{instance!r} at rest, {len(instance.over_capacity)} overdrawn", invariant=9)


def check_front_rest(front: FrontMachine) -> None:
    check_empty(front, {("FrontMachine", "_handlers"): lambda _: len(get_args(FrontEvent))}, (), ())


def bounds_of(router: Router, config: RouterConfig) -> Mapping[Place, Bound]:
    instances = len(router.membership.instances)
    return {
        **dict.fromkeys(PER_INSTANCE, lambda _: instances),
        **dict.fromkeys(ONCE_KNOWN, lambda _: config.instances_max),
        **dict.fromkeys(LAZY, lambda _: STALE_MAX + 1),
        **dict.fromkeys(KEYS, lambda _: router.membership.index.share),
        **dict.fromkeys(FIXED, lambda _: FIXED_MAX),
        ("PrefixIndex", "_holders"): lambda _: max(config.prefix_keys_max, instances),
        # one entry per pair of size classes of the instances, for requests of one token and for others
        ("Placement", "_counts_of"): lambda _: 2 * (instances + 1) ** 2,
    }
