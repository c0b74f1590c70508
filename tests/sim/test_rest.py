"""The at-rest check: a container that nobody named must be empty, and one that is named has its bound."""

from __future__ import annotations

from collections import deque

import pytest

from baton.config import InstanceConfig, KVConfig, RouterConfig, SchedulerConfig, TierConfig
from baton.core.cluster.events import InstanceJoined, Session
from baton.core.cluster.router import Router
from baton.core.engine.loading import SequenceLoad
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import InstanceHello
from baton.protocol.versions import CACHED_KEYS
from baton.sim.cluster.rest import check_router_rest
from baton.sim.rest import BOUNDED, check_rest, containers


def made() -> Instance:
    return Instance(
        InstanceConfig(
            kv=KVConfig(blocks=8),
            scheduler=SchedulerConfig(slots=2),
            tiers=TierConfig(host_blocks=4, storage=True, attempts_max=3),
        )
    )


def names(instance: Instance) -> list[tuple[str, str]]:
    return [(type(owner).__name__, name) for owner, name, _ in containers(instance)]


def test_a_fresh_instance_is_at_rest():
    check_rest(made())


def test_it_walks_all_parts_of_an_instance():
    found = names(made())
    for place in [
        ("Board", "groups"), ("Loader", "_bringing"), ("Tiers", "_moves"), ("StorageCalls", "_out"), ("Circuit", "_permits"),
        ("Destination", "_reservations"), ("Suspects", "_held"), ("WritePolicy", "to_put"), ("Deadlines", "_heap"),
        ("Outbox", "tokens"), ("StepPipeline", "_early"), ("Sleeping", "_wakes"),
    ]:  # fmt: skip
        assert place in found
    links = ("TokenLinks", "_of_host"), ("TokenLinks", "_of_device")  # made when storage wants token ids
    digest = ("CacheDigest", "_held"), ("CacheDigest", "_changes")  # made when there are routers
    assert set(BOUNDED) <= {*found, *links, *digest}, "a bound is named for a container that is not there"


def test_every_container_that_is_not_named_must_be_empty():
    for owner, name, container in containers(made()):
        if (type(owner).__name__, name) in BOUNDED or isinstance(container, bytearray):
            continue
        instance = made()
        again = next(c for o, n, c in containers(instance) if (type(o), n) == (type(owner), name))
        if isinstance(again, dict):
            again[1] = None
        else:
            again.append(None)
        with pytest.raises(InvariantBroken, match=rf"{name.strip('_')} has 1 entries") as broken:
            check_rest(instance)
        assert broken.value.invariant == 9


def test_a_container_that_was_added_since_is_found():
    instance = made()
    instance._loader._waiters = {7: []}  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken, match=r"Loader\._waiters"):
        check_rest(instance)
    instance._loader._waiters = deque([3])  # type: ignore[attr-defined]
    with pytest.raises(InvariantBroken, match=r"Loader\._waiters"):
        check_rest(instance)


def test_what_is_remembered_on_purpose_has_a_bound():
    instance = made()
    instance._handoff._attempts.update({f"r{number}": 1 for number in range(3)})
    check_rest(instance)
    instance._handoff._attempts["one more"] = 1
    with pytest.raises(InvariantBroken, match="may have 3") as broken:
        check_rest(instance)
    assert broken.value.invariant == 49


def routed(config: RouterConfig) -> Router:
    """A router with two instances, about one of which it has guessed."""
    router, now = Router(config), Instant(1.0)
    for number in range(2):
        ready = InstanceReady(64, 4, 8, 1000, 4096, identity=b"m")
        hello = InstanceHello(f"i{number}", 1, "mixed", ready, b"l", capabilities=(CACHED_KEYS,))
        router.handle(InstanceJoined(Session(number), hello), now)
    return router


def test_objects_inside_containers_are_walked():
    found = {(type(owner).__name__, name) for owner, name, _ in containers(routed(RouterConfig()))}
    for place in [
        ("KnownKeys", "keys"), ("KnownKeys", "void"), ("InstanceGroup", "by_load"),
        ("ClusterInstance", "assigned"), ("Paths", "_failed"),
    ]:  # fmt: skip
        assert place in found
    check_router_rest(routed(RouterConfig()), RouterConfig())


def test_what_a_router_knows_of_an_instance_has_a_bound():
    config = RouterConfig(prefix_keys_max=20)
    router = routed(config)
    known = router.membership.index._known[1]
    known.guesses = dict.fromkeys(range(10))
    check_router_rest(router, config)
    known.guesses = dict.fromkeys(range(11))
    with pytest.raises(InvariantBroken, match=r"KnownKeys\.guesses has 11 entries at rest, and may have 10"):
        check_router_rest(router, config)
    router = routed(config)
    router.membership.names["i1"].over_capacity[RequestId("r")] = (0, 0.0, 1)
    with pytest.raises(InvariantBroken, match=r"ClusterInstance\.over_capacity has 1"):
        check_router_rest(router, config)


def test_a_list_of_slots_may_not_name_a_request():
    instance = made()
    instance.board.slots.slot_owners[0] = SequenceLoad(instance._loader, None)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match="refers to an object of the core"):
        check_rest(instance)
