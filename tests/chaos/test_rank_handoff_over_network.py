"""Hand-offs from two ranks to two that share no memory: the KV of each rank goes over a TCP connection of its own. Ranks are
killed, stopped or ended while bytes are on their way, and the client gets the tokens of an undisturbed run, once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from chaos_disturbed import DisturbedCluster
from chaos_server import Server
from test_handoff_kills import INSTANCES, NUMBERS, body, disturbed, handoffs, pools_of, require_as_undisturbed, told
from test_handoff_over_network import PHASES
from test_rank_kills import RANKS, STEPS, VICTIMS

FAR = {"orders": {"far": True}, "transfer_address": "127.0.0.1:0"}
QUICK = {("some bytes have arrived", "prefill-0/cache.1", "SIGKILL")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join(case))
    for case in itertools.product(PHASES, VICTIMS, ("SIGKILL", "SIGSTOP", "SIGTERM"))
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The undisturbed run, of one instance."""
    with Server(tiny, tmp_path_factory.mktemp("alone"), **RANKS).wait_ready() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedCluster]:
    with DisturbedCluster(tiny, tmp_path_factory.mktemp("cluster"), INSTANCES, **STEPS, **RANKS, **FAR).wait_ready() as cluster:
        yield cluster


def require_handed_over(cluster: DisturbedCluster, alone: Server) -> None:
    """Prompts are not computed twice: every copy arrives, from the first on, and over the network."""
    cluster.wait_all_there()
    before, requests = handoffs(cluster), [body(next(NUMBERS), temperature=heat) for heat in (0.0, 1.0)]
    for request in requests:
        assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))
    assert handoffs(cluster) == before + len(requests)
    services = [f"{name}/cache{rank}" for name in INSTANCES for rank in ("", ".1")]
    assert {service: pools_of(cluster.process(service).pid) for service in services} == dict.fromkeys(services, 1)
    cluster.wait_idle()
    assert cluster.number_of("baton:router_handoff_ends_total", outcome="not_copied") == 0


def test_prompts_are_handed_over_from_rank_to_rank_over_the_network(cluster: DisturbedCluster, alone: Server):
    require_handed_over(cluster, alone)
    (prefill,) = (one for one in cluster.ask("/v1/cluster").json["instances"] if one["name"] == "prefill-0")
    places = [[address for address in line.split() if address.startswith("tcp:")] for line in prefill["peers"]]
    assert [len(line) for line in places] == [1, 1]
    assert places[0] != places[1]


@pytest.mark.parametrize(("phase", "victim", "number"), CASES)
def test_a_hand_off_over_the_network_survives_the_end_of_a_rank(
    cluster: DisturbedCluster, alone: Server, phase: str, victim: str, number: str
):
    cluster.wait_all_there()
    request, reply = asyncio.run(disturbed(cluster, PHASES[phase], victim, number))
    require_as_undisturbed(cluster, alone, request, reply)


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["tls", "keyed"])
def test_copies_of_ranks_are_protected_as_those_of_one(tiny: Path, tmp_path: Path, alone: Server, protection: str):
    settings: dict[str, Any] = {"transfer_digest": "keyed"}
    if protection == "tls":
        files = Certificates(tmp_path).files("member")
        names = {"cluster_ssl_certfile": files.certfile, "cluster_ssl_keyfile": files.keyfile}
        settings = {"certificate": {**names, "cluster_ssl_ca_certs": files.ca_certs}}
    with DisturbedCluster(tiny, tmp_path / "cluster", INSTANCES, **STEPS, **RANKS, **FAR, **settings).wait_ready() as cluster:
        require_handed_over(cluster, alone)
