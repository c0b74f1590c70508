"""Exchanges among real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_process import numbers_of
from ranks_model import greedy

from baton.native.build import NoCompiler
from baton.native.library import load_best

HERE = Path(__file__).parent
ON_LOOPBACK = {"127.0.0.1", "::1"}
ELSEWHERE = """
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 198.18.0.5/24 dev eth0
ip link set eth0 up
mount --bind "$0" /etc/hosts
hostname elsewhere
exec "$@"
"""
"""In namespaces of its own: the host name is the address of a network. $0: the file of hosts."""


@pytest.fixture(autouse=True)
def compiler():
    try:
        load_best()
    except NoCompiler as error:
        pytest.skip(str(error))


def start(ranks: int, task: str, *more: str) -> list[subprocess.Popen[str]]:
    fd = os.memfd_create("ranks")
    try:
        return [
            subprocess.Popen(
                [sys.executable, str(HERE / "rank_process.py"), str(rank), str(ranks), str(fd), task, *more],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
    finally:
        os.close(fd)


def answers(processes: list[subprocess.Popen[str]]) -> list:
    return [json.loads(process.communicate(timeout=300)[0]) for process in processes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_added_in_the_order_of_ranks_on_every_rank(ranks):
    found = answers(start(ranks, "sums"))
    assert all(each == found[0] for each in found)
    for number, text in enumerate(found[0][0]):
        count = 1 + 397 * number % 5000
        total = numbers_of(0, count)
        for rank in range(1, ranks):
            total = total + numbers_of(rank, count)
        assert text == total.tobytes().hex()[:64] + str(float(total.astype(np.float64).sum()))
    assert found[0][1] == float(np.stack([numbers_of(rank, 3000) for rank in range(ranks)]).astype(np.float64).sum())
    assert found[0][2] == 101 - ranks
    assert found[0][3] == ["00", "01", "02"][:ranks]


def test_a_rank_that_does_not_come_is_named():
    processes = start(2, "alone")
    assert answers(processes[:1]) == ["rank 1 did not answer rank 0 within 1 seconds"]
    assert answers(processes[1:]) == [[]]


def test_two_processes_give_the_tokens_of_one():
    """Of a model with experts, which are whole on one rank or the other."""
    assert answers(start(2, "tokens")) == [greedy()] * 2


def gloo(folder: Path, ranks: int, *within: str) -> tuple[list, list[str], str]:
    """The answers of all ranks, the addresses at which they listened, and what a rank says whose peer does not come."""
    command = [*within, sys.executable, str(HERE / "gloo_process.py"), str(ranks), str(folder), "alone"]
    line = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout
    found = [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(ranks)]
    return [answer for answer, _ in found], [address for _, listened in found for address in listened], json.loads(line)


def test_gloo_sums_in_the_order_of_ranks_and_names_one_that_does_not_come(tmp_path, monkeypatch):
    """Without a C compiler, and for two ranks on one GPU."""
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # as images for programs that span machines have it
    total = numbers_of(0, 999) + numbers_of(1, 999) + numbers_of(2, 999)
    found, listened, alone = gloo(tmp_path, 3)
    assert found == [[total.tobytes().hex(), [[float(rank)] * 2 for rank in range(3)], 98, 3]] * 3
    assert len(listened) >= 3
    assert set(listened) <= ON_LOOPBACK
    assert alone == "rank 1 did not answer rank 0 within 0.2 seconds"


def test_gloo_listens_on_loopback_where_the_host_name_is_an_address_of_a_network(tmp_path):
    """As in a container. Found by an audit: there both ranks listened on the network, and gloo does not ask who connects."""
    pytest.importorskip("torch")
    hosts = tmp_path / "hosts"
    hosts.write_text("198.18.0.5 elsewhere\n127.0.0.1 localhost\n")
    within = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "sh", "-ec", ELSEWHERE, str(hosts))
    try:
        resolved = subprocess.run([*within, "getent", "hosts", "elsewhere"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        pytest.skip(str(error))
    if not resolved.stdout.startswith("198.18.0.5"):
        pytest.skip(f"this machine does not let a test have a network and a host name of its own: {resolved.stderr.strip()}")
    _, listened, _ = gloo(tmp_path, 2, *within)
    assert len(listened) >= 2
    assert set(listened) <= ON_LOOPBACK


@pytest.mark.slow
def test_three_ranks_of_the_default_model_give_the_tokens_of_one(smollm2_path):
    assert answers(start(3, "tokens", str(smollm2_path))) == [greedy(path=smollm2_path)] * 3
