"""Checks of the addresses at which other machines read an instance's KV cache: a port for each rank, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from baton.addresses import EVERYWHERE, Address, parse_listening
from baton.config.engine import EngineOptions
from baton.config.values import require
from baton.errors import InvalidConfig

PORT_MAX: Final = 65_535


def check_transfer(given: EngineOptions, ranks: int, routers: Sequence[str], taken: Mapping[str, tuple[str, int]]) -> None:
    """`taken`: host and port of other options; port 0: none yet. Raises InvalidConfig."""
    listens = given.transfer_address not in ("auto", "none")
    if listens:
        try:
            place = parse_listening(given.transfer_address)
        except InvalidConfig as error:
            raise InvalidConfig(f"transfer_address {error}; or auto, or none") from None
        require(bool(routers), "transfer_address is for an instance that has a --router")
        _check_range("transfer_address", place, ranks)
        for name, (host, port) in taken.items():
            require(
                not (port and place.port <= port < place.port + ranks and _overlap(place.host, host)),
                f"transfer_address is {given.transfer_address!r}{_ports(place, ranks)}, and {name} is {port}: "
                "give one of them another port",
            )
    if given.transfer_announce:
        require(listens, "transfer_announce needs the port that is forwarded: give --transfer-address 0.0.0.0:PORT too")
        place = parse_listening(given.transfer_announce)
        require(
            place.port != 0 and place.host not in EVERYWHERE,
            f"transfer_announce is {given.transfer_announce!r}: give HOST:PORT that other machines reach",
        )
        _check_range("transfer_announce", place, ranks)


def _check_range(name: str, place: Address, ranks: int) -> None:
    require(
        place.port + ranks - 1 <= PORT_MAX,
        f"{name} is {str(place).removeprefix('tcp://')!r}{_ports(place, ranks)}, and the last port there is is {PORT_MAX}: "
        "give a lower one",
    )


def _ports(place: Address, ranks: int) -> str:
    return f": {ranks} ranks need the ports {place.port} to {place.port + ranks - 1}" if ranks > 1 else ""


def _overlap(one: str, other: str) -> bool:
    """Whether sockets of these two hosts cannot have the same port. :: listens on IPv4 too."""
    pair = {one, other}
    return len(pair) == 1 or "::" in pair or ("0.0.0.0" in pair and not any(":" in host for host in pair))
