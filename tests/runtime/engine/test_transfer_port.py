"""Where an engine lets messengers of other instances dial: at an address that a session with a router leaves from."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from baton.addresses import parse_address
from baton.errors import InvalidConfig
from baton.runtime.engine import transfer_port
from baton.runtime.engine.transfer_port import TransferPort

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
    port = TransferPort("auto", ["unix:/run/router.sock", NAMED])
    assert (port.sock, port.address) == (None, "")
    for host in ("", "127.0.0.1", "::1"):
        assert not port.reached(host, on_gpu=False)
    assert (port.sock, port.address) == (None, "")


def test_none_is_none(outside: None):
    port = TransferPort("none", [ELSEWHERE])
    assert not port.reached(OURS, on_gpu=True)
    assert port.sock is None


def test_by_itself_it_listens_where_the_session_leaves_from(outside: None):
    """A name that resolves late, or to several addresses, so cannot lead to a wrong one."""
    port = TransferPort("auto", [NAMED])
    assert port.reached(OURS, on_gpu=False)
    assert port.address.startswith(f"tcp://{OURS}:")
    dial(port.address)
    assert not port.reached(OURS, on_gpu=False), "and there it stays"
    assert not port.reached("127.0.0.1", on_gpu=True)
    port.close()


def test_a_pool_on_a_gpu_is_read_over_loopback_until_another_machine_sees_us(outside: None):
    port = TransferPort("auto", ["tcp://127.0.0.1:8100", NAMED])
    assert port.reached("127.0.0.1", on_gpu=True)
    local = port.address
    assert local.startswith("tcp://127.0.0.1:")
    dial(local)
    assert not port.reached("", on_gpu=True)
    assert port.reached(OURS, on_gpu=True)
    assert port.address.startswith(f"tcp://{OURS}:")
    dial(port.address)
    with pytest.raises(OSError, match="refused"):
        dial(local)
    port.close()


def test_a_session_over_a_unix_socket_is_one_of_this_machine():
    port = TransferPort("auto", ["unix:/run/router.sock"])
    assert port.reached("", on_gpu=True)
    dial(port.address)
    port.close()


def test_a_link_local_address_is_not_announced():
    port = TransferPort("auto", [NAMED])
    assert not port.reached("fe80::1%eth0", on_gpu=True)


def test_an_address_that_is_given_is_taken_as_it_is(outside: None):
    port = TransferPort("127.0.0.1:0", [ELSEWHERE])
    assert port.sock is not None
    assert port.address == f"tcp://127.0.0.1:{port.sock.getsockname()[1]}"
    assert not port.reached(OURS, on_gpu=True)
    with pytest.raises(InvalidConfig, match="port that is free"):
        TransferPort(port.address.removeprefix("tcp://"), [ELSEWHERE])
    port.close()


def test_on_all_interfaces_the_one_towards_the_router_is_announced(outside: None):
    port = TransferPort("0.0.0.0:0", [ELSEWHERE])
    assert port.address == "", "nobody knows yet where it is seen"
    assert port.reached(OURS, on_gpu=False)
    assert port.address.startswith(f"tcp://{OURS}:")
    dial(port.address)
    port.close()


@pytest.mark.parametrize("routers", [("tcp://127.0.0.1:8100", "tcp://[::1]:8100"), ("unix:/run/router.sock",), ()])
def test_all_interfaces_for_routers_of_this_machine_are_refused(routers: tuple[str, ...]):
    with pytest.raises(InvalidConfig, match="give an address that other machines reach"):
        TransferPort("0.0.0.0:0", routers)


@needs_ipv6
def test_all_interfaces_of_ipv6_are_those_of_ipv4_too(outside: None):
    """What is announced for a router of IPv4 was refused there."""
    port = TransferPort("[::]:0", [ELSEWHERE])
    assert port.reached(OURS, on_gpu=False)
    dial(port.address)
    port.close()
    port = TransferPort("[::]:0", [NAMED])
    assert port.reached("::1", on_gpu=False)
    assert port.address.startswith("tcp://[::1]:")
    dial(port.address)
    port.close()


def test_all_interfaces_of_ipv4_and_a_router_of_ipv6_are_refused_in_words():
    with pytest.raises(InvalidConfig, match=r"listens on IPv4, and the router's address is IPv6; give \[::\]:PORT"):
        TransferPort("0.0.0.0:0", ["tcp://[2001:db8::1]:8100"])


def test_a_name_that_turns_out_to_be_of_the_other_family_is_not_announced(outside: None, caplog: pytest.LogCaptureFixture):
    port = TransferPort("0.0.0.0:0", [NAMED])
    assert not port.reached("::1", on_gpu=False)
    assert port.address == ""
    assert "does not listen at ::1" in caplog.text
    port.close()


def test_an_address_of_another_machine_is_refused():
    for given in ("192.0.2.7:0", "nowhere.invalid:0"):
        with pytest.raises(InvalidConfig, match="give an address of this machine"):
            TransferPort(given, [ELSEWHERE])


def test_an_address_that_cannot_be_listened_on_any_more_costs_a_warning(outside: None, caplog: pytest.LogCaptureFixture):
    port = TransferPort("auto", [NAMED])
    assert not port.reached("192.0.2.9", on_gpu=False)
    assert "other instances cannot read our KV cache" in caplog.text


@pytest.mark.parametrize("given", ["0.0.0.0:0", "127.0.0.1:0"])
def test_another_address_is_announced_behind_nat(outside: None, given: str):
    port = TransferPort(given, ["tcp://127.0.0.1:8100"], "nat.example:9000")
    assert port.address == "tcp://nat.example:9000"
    assert not port.reached(OURS, on_gpu=True), "whatever way sessions leave"
    assert port.address == "tcp://nat.example:9000"
    assert port.sock is not None
    dial(f"tcp://127.0.0.1:{port.sock.getsockname()[1]}")
    port.close()
