"""The at-rest check: a container that nobody named must be empty, and one that is named has its bound."""

from __future__ import annotations

from collections import deque

import pytest

from baton.config import InstanceConfig, KVConfig, RouterConfig, SchedulerConfig, TierConfig
from baton.core.cluster.events import InstanceJoined, Session
from baton.core.cluster.router import Router
from baton.core.delivery.front import ClientRequest, FrontMachine
from baton.core.engine.loading import SequenceLoad
from baton.core.instance import Instance
from baton.core.rank_messages import CacheRanks, WorkerRanks
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import InstanceHello
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.protocol.versions import CACHED_KEYS
from baton.sim.cluster.rest import check_front_rest, check_router_rest
from baton.sim.rest import BOUNDED, check_rest, containers
from baton.sim.run import run
from baton.sim.scenario import Client, Cluster, InstanceSpec, Scenario


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


# Fronts and ranks, in the runs that own them


def front_scenario() -> Scenario:
    clients = [Client(f"r{number}", 0.1 * number, [1, 2, 3], 3) for number in range(2)]
    cluster = Cluster(instances=[InstanceSpec("mixed", 16, 2, 16)], front=True)
    return Scenario(seed=1, blocks=16, block_size=4, slots=2, tokens_per_step=16, clients=clients, cluster=cluster)


def ranks_scenario() -> Scenario:
    """Two ranks with a host tier, which compute and copy a few blocks."""
    clients = [Client(f"r{number}", 0.1 * number, [1, 2, 3, 4, number], 3) for number in range(3)]
    size = {"blocks": 4, "block_size": 2, "slots": 2, "tokens_per_step": 8}
    return Scenario(seed=1, clients=clients, ranks=2, host_blocks=8, **size)


@pytest.mark.parametrize("made", [front_scenario, ranks_scenario])
def test_these_runs_pass_without_a_leak(made):
    assert run(made()).violation == ""


def leaking(monkeypatch, owner: type, name: str, leak) -> None:
    """Let a method leak whenever it has returned."""
    kept = getattr(owner, name)

    def changed(self, *arguments):
        result = kept(self, *arguments)
        leak(self)
        return result

    monkeypatch.setattr(owner, name, changed)


def test_what_a_front_leaks_is_found(monkeypatch):
    leaking(monkeypatch, FrontMachine, "_on_arrive", lambda front: front._handlers.update({object(): None}))
    outcome = run(front_scenario())
    assert outcome.invariant == 49
    assert "FrontMachine._handlers has 15 entries at rest, and may have 9" in str(outcome.violation)


def test_a_ledger_that_a_front_keeps_is_found():
    front = FrontMachine()
    check_front_rest(front)
    request = GenerateRequest(id=RequestId("r"), prompt=(1,), sampling=SamplingParams(max_tokens=1))
    front.handle(ClientRequest(request, None), Instant(0.0))
    with pytest.raises(InvariantBroken, match=r"FrontMachine\.ledgers has 1 entries") as broken:
        check_front_rest(front)
    assert broken.value.invariant == 9


@pytest.mark.parametrize(
    ("owner", "method", "leak", "invariant", "text"),
    [
        (WorkerRanks, "combined", lambda ranks: ranks._digests._answers.update({-1: {}}), 9, "StepDigests._answers has 1"),
        (WorkerRanks, "combined", lambda ranks: ranks._hellos._open.update({"late": {}}), 9, "RankAnswers._open has 1"),
        (WorkerRanks, "combined", lambda ranks: ranks._pongs_of.append(0), 49, "WorkerRanks._pongs_of has"),
        (CacheRanks, "combined", lambda ranks: ranks._moves._open.update({-1: {}}), 9, "RankAnswers._open has 1"),
        (CacheRanks, "combined", lambda ranks: ranks._stats.append(None), 49, "CacheRanks._stats has"),
    ],
    ids=["digests", "hellos", "pongs", "moves", "stats"],
)
def test_what_is_left_of_ranks_is_found(monkeypatch, owner, method, leak, invariant, text):
    leaking(monkeypatch, owner, method, leak)
    outcome = run(ranks_scenario())
    assert (outcome.invariant, text in str(outcome.violation)) == (invariant, True), outcome.violation
