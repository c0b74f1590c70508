"""Where an engine lets messengers of other instances dial: at an address that a session with a router leaves from."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import pytest

from baton.addresses import parse_address
from baton.errors import InvalidConfig
from baton.runtime.engine import transfer_port
from baton.runtime.engine.transfer_port import TransferPorts

ELSEWHERE = "tcp://192.0.2.7:8100"
"""An address that nobody has."""
NAMED = "tcp://router.example:8100"
OURS = "127.0.0.9"

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.9 and ::1 are to count as addresses that other machines see."""
    real = ipaddress.ip_address

    class Outside:
        is_loopback, version = False, 4

    seen = (OURS, "::1")
    monkeypatch.setattr(transfer_port.ipaddress, "ip_address", lambda host: Outside() if host in seen else real(host))


def dial(address: str) -> None:
    place = parse_address(address)
    socket.create_connection((place.host, place.port), 5).close()


def test_by_itself_nothing_is_opened_before_a_router_is_reached_nor_for_routers_of_this_machine():
    port = TransferPorts("auto", ["unix:/run/router.sock", NAMED])
    assert (port.socks, port.addresses) == ([], [])
    for host in ("", "127.0.0.1", "::1"):
        assert not port.reached(host, on_gpu=False)
    assert (port.socks, port.addresses) == ([], [])


def test_none_is_none(outside: None):
    port = TransferPorts("none", [ELSEWHERE])
    assert not port.reached(OURS, on_gpu=True)
    assert port.socks == []


def test_by_itself_it_listens_where_the_session_leaves_from(outside: None):
    """A name that resolves late, or to several addresses, so cannot lead to a wrong one."""
    port = TransferPorts("auto", [NAMED])
    assert port.reached(OURS, on_gpu=False)
    assert port.addresses[0].startswith(f"tcp://{OURS}:")
    dial(port.addresses[0])
    assert not port.reached(OURS, on_gpu=False), "and there it stays"
    assert not port.reached("127.0.0.1", on_gpu=True)
    port.close()


def test_a_pool_on_a_gpu_is_read_over_loopback_until_another_machine_sees_us(outside: None):
    port = TransferPorts("auto", ["tcp://127.0.0.1:8100", NAMED])
    assert port.reached("127.0.0.1", on_gpu=True)
    local = port.addresses[0]
    assert local.startswith("tcp://127.0.0.1:")
    dial(local)
    assert not port.reached("", on_gpu=True)
    assert port.reached(OURS, on_gpu=True)
    assert port.addresses[0].startswith(f"tcp://{OURS}:")
    dial(port.addresses[0])
    with pytest.raises(OSError, match="refused"):
        dial(local)
    port.close()


def test_a_session_over_a_unix_socket_is_one_of_this_machine():
    port = TransferPorts("auto", ["unix:/run/router.sock"])
    assert port.reached("", on_gpu=True)
    dial(port.addresses[0])
    port.close()


def test_a_link_local_address_is_not_announced():
    port = TransferPorts("auto", [NAMED])
    assert not port.reached("fe80::1%eth0", on_gpu=True)


def test_an_address_that_is_given_is_taken_as_it_is(outside: None):
    port = TransferPorts("127.0.0.1:0", [ELSEWHERE])
    assert port.addresses == [f"tcp://127.0.0.1:{port.socks[0].getsockname()[1]}"]
    assert not port.reached(OURS, on_gpu=True)
    with pytest.raises(InvalidConfig, match="port that is free"):
        TransferPorts(port.addresses[0].removeprefix("tcp://"), [ELSEWHERE])
    port.close()


def test_on_all_interfaces_the_one_towards_the_router_is_announced(outside: None):
    port = TransferPorts("0.0.0.0:0", [ELSEWHERE])
    assert port.addresses == [], "nobody knows yet where it is seen"
    assert port.reached(OURS, on_gpu=False)
    assert port.addresses[0].startswith(f"tcp://{OURS}:")
    dial(port.addresses[0])
    port.close()


@pytest.mark.parametrize("routers", [("tcp://127.0.0.1:8100", "tcp://[::1]:8100"), ("unix:/run/router.sock",), ()])
def test_all_interfaces_for_routers_of_this_machine_are_refused(routers: tuple[str, ...]):
    with pytest.raises(InvalidConfig, match="give an address that other machines reach"):
        TransferPorts("0.0.0.0:0", routers)


@needs_ipv6
def test_all_interfaces_of_ipv6_are_those_of_ipv4_too(outside: None):
    """What is announced for a router of IPv4 was refused there."""
    port = TransferPorts("[::]:0", [ELSEWHERE])
    assert port.reached(OURS, on_gpu=False)
    dial(port.addresses[0])
    port.close()
    port = TransferPorts("[::]:0", [NAMED])
    assert port.reached("::1", on_gpu=False)
    assert port.addresses[0].startswith("tcp://[::1]:")
    dial(port.addresses[0])
    port.close()


def test_all_interfaces_of_ipv4_and_a_router_of_ipv6_are_refused_in_words():
    with pytest.raises(InvalidConfig, match=r"listens on IPv4, and the router's address is IPv6; give \[::\]:PORT"):
        TransferPorts("0.0.0.0:0", ["tcp://[2001:db8::1]:8100"])


def test_a_name_that_turns_out_to_be_of_the_other_family_is_not_announced(outside: None, caplog: pytest.LogCaptureFixture):
    port = TransferPorts("0.0.0.0:0", [NAMED])
    assert not port.reached("::1", on_gpu=False)
    assert port.addresses == []
    assert "does not listen at ::1" in caplog.text
    port.close()


def test_an_address_of_another_machine_is_refused():
    for given in ("192.0.2.7:0", "nowhere.invalid:0"):
        with pytest.raises(InvalidConfig, match="give an address of this machine"):
            TransferPorts(given, [ELSEWHERE])


def test_an_address_that_cannot_be_listened_on_any_more_costs_a_warning(outside: None, caplog: pytest.LogCaptureFixture):
    port = TransferPorts("auto", [NAMED])
    assert not port.reached("192.0.2.9", on_gpu=False)
    assert "other instances cannot read our KV cache" in caplog.text


@pytest.mark.parametrize("given", ["0.0.0.0:0", "127.0.0.1:0"])
def test_another_address_is_announced_behind_nat(outside: None, given: str):
    port = TransferPorts(given, ["tcp://127.0.0.1:8100"], "nat.example:9000")
    assert port.addresses == ["tcp://nat.example:9000"]
    assert not port.reached(OURS, on_gpu=True), "whatever way sessions leave"
    assert port.addresses == ["tcp://nat.example:9000"]
    dial(f"tcp://127.0.0.1:{port.socks[0].getsockname()[1]}")
    port.close()


def port_of(address: str) -> int:
    return parse_address(address).port


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many ports in a row that are free."""
    for first in range(20_000, 60_000, count):
        with contextlib.suppress(InvalidConfig):
            TransferPorts(f"{host}:{first}", [ELSEWHERE], ranks=count).close()
            return first
    raise AssertionError("no ports are free")


def test_each_rank_has_a_port_of_its_own_any_that_is_free(outside: None):
    ports = TransferPorts("auto", [NAMED], ranks=3)
    assert (ports.socks, ports.addresses) == ([], [])
    assert ports.reached(OURS, on_gpu=False)
    assert len({port_of(address) for address in ports.addresses}) == 3
    for address, sock in zip(ports.addresses, ports.socks, strict=True):
        assert address == f"tcp://{OURS}:{sock.getsockname()[1]}"
        dial(address)
    assert not ports.reached(OURS, on_gpu=False)
    ports.close()


def test_given_ports_are_the_first_ranks_and_those_after_it(outside: None):
    first = free_ports(3)
    ports = TransferPorts(f"127.0.0.1:{first}", [ELSEWHERE], ranks=3)
    assert ports.addresses == [f"tcp://127.0.0.1:{first + rank}" for rank in range(3)]
    for address in ports.addresses:
        dial(address)
    ports.close()
    everywhere = TransferPorts(f"0.0.0.0:{first}", [ELSEWHERE], ranks=3)
    assert everywhere.reached(OURS, on_gpu=False)
    assert everywhere.addresses == [f"tcp://{OURS}:{first + rank}" for rank in range(3)]
    everywhere.close()


def test_a_port_of_a_later_rank_that_is_taken_is_named_and_none_stays_open():
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 2)):
        with pytest.raises(InvalidConfig, match=rf"cannot listen on 127\.0\.0\.1:{first + 2} .*port that is free"):
            TransferPorts(f"127.0.0.1:{first}", [ELSEWHERE], ranks=3)
        with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
            pass


def test_each_rank_is_announced_at_a_forwarded_port_of_its_own():
    ports = TransferPorts("127.0.0.1:0", [ELSEWHERE], "nat.example:9000", ranks=2)
    assert ports.addresses == ["tcp://nat.example:9000", "tcp://nat.example:9001"]
    ports.close()
