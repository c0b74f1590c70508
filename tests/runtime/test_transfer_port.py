"""Where an engine lets messengers of other machines dial."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from run_loop import finish

from baton.errors import InvalidConfig
from baton.runtime import transfer_port
from baton.runtime.transfer_port import TransferPort, open_transfer_port

ELSEWHERE = "tcp://192.0.2.7:8100"
"""An address that nobody has."""


def opened(given: str, *routers: str) -> TransferPort | None:
    return asyncio.run(open_transfer_port(given, routers))


@pytest.fixture
def way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that reaches ELSEWHERE from 127.0.0.9, which is to count as seen from there."""
    outside = {"192.0.2.7": "127.0.0.9"}
    monkeypatch.setattr(transfer_port, "_own_address", lambda family, place: outside.get(place[0], "127.0.0.1"))
    real = transfer_port.ipaddress.ip_address

    class Outside:
        is_loopback = False

    monkeypatch.setattr(transfer_port.ipaddress, "ip_address", lambda host: Outside() if host == "127.0.0.9" else real(host))


@pytest.mark.parametrize("routers", [(), ("unix:/run/router.sock",), ("tcp://127.0.0.1:8100", "tcp://[::1]:8100")])
def test_with_routers_of_this_machine_only_nothing_is_opened(routers: tuple[str, ...]):
    assert opened("auto", *routers) is None


def test_none_is_none(way_out: None):
    assert opened("none", ELSEWHERE) is None


def test_by_itself_it_listens_where_the_router_sees_it(way_out: None):
    port = opened("auto", "unix:/run/router.sock", "tcp://127.0.0.1:8100", ELSEWHERE)
    assert port is not None
    host, number = port.sock.getsockname()
    assert (host, port.address) == ("127.0.0.9", f"tcp://127.0.0.9:{number}")
    socket.create_connection((host, number), 5).close()
    port.close()


def test_an_address_that_is_given_is_taken_as_it_is():
    port = opened("127.0.0.1:0")
    assert port is not None
    assert port.address == f"tcp://127.0.0.1:{port.sock.getsockname()[1]}"
    with pytest.raises(InvalidConfig, match="port that is free"):
        opened(port.address.removeprefix("tcp://"))
    port.close()


def test_on_all_interfaces_the_one_towards_the_router_is_announced(way_out: None):
    port = opened("0.0.0.0:0", ELSEWHERE)
    assert port is not None
    host, number = port.sock.getsockname()
    assert (host, port.address) == ("0.0.0.0", f"tcp://127.0.0.9:{number}")
    port.close()
    with pytest.raises(InvalidConfig, match="give an address that other machines reach"):
        opened("0.0.0.0:0", "tcp://127.0.0.1:8100")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(InvalidConfig, match="give an address of this machine"):
        opened("192.0.2.7:0")
    with pytest.raises(InvalidConfig, match="give an address of this machine"):
        opened("nowhere.invalid:0")


def test_a_router_that_has_no_address_yet_costs_a_warning(caplog: pytest.LogCaptureFixture):
    assert opened("auto", "tcp://nowhere.invalid:8100") is None
    assert "unless --transfer-address is given" in caplog.text


def test_a_name_that_nobody_answers_for_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    async def never(address: object) -> list[tuple[int, object]]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(transfer_port, "resolved", never)
    monkeypatch.setattr(transfer_port, "RESOLVE_SECONDS", 0.01)
    assert opened("auto", "tcp://router.example:8100") is None
    assert "cannot be found (no answer)" in caplog.text
    assert "unless --transfer-address is given" in caplog.text


def test_what_packets_leave_from():
    async def main() -> None:
        assert transfer_port._own_address(socket.AF_INET, ("127.0.0.1", 9)) == "127.0.0.1"

    finish(main())
