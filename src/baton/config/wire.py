"""Limits of connections in a cluster: sessions of routers and instances, and the transfer of KV blocks.

They appear in the log and in docs/limits.md, and are changed with `--wire '{readers_max: 512}'` or a table `wire:` in the YAML
file, and GET /config shows the values in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from baton.config.parts import with_changes
from baton.config.values import Seconds
from baton.ranges import Range, check_values

Connections = Annotated[int, Range(1, 65_536)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    readers_max: Connections = 256
    """Maximum of instances that may read this one's KV pool at once, per transport. One more closes the connection that is idle
    longest."""
    reader_handshakes_max: Connections = 32
    "Maximum of unauthenticated connections to the transfer port. Beyond it the oldest is closed."
    reader_handshake_seconds: Seconds = 2.0
    "Seconds for a reader of the KV pool to authenticate and name the pool."
    reader_idle_seconds: Seconds = 120.0
    "Seconds after which a reader without a request is closed. It reconnects when needed."
    reader_send_seconds: Seconds = 10.0
    "Seconds in which a reader must receive a piece of blocks; else it is closed."
    peers_max: Connections = 256
    "Maximum of open KV pools of other instances. Beyond it the least recently used one is closed."
    peer_open_seconds: Seconds = 2.0
    "Seconds to open one address of another instance's KV pool before the next one is tried."
    peer_idle_seconds: Seconds = 60.0
    "Seconds after which another instance's KV pool that was not read is closed."
    session_handshakes_max: Connections = 64
    "Maximum of unauthenticated connections to a router's cluster port. Beyond it the oldest is closed."
    session_handshake_seconds: Seconds = 5.0
    "Seconds for both sides of a session to prove that they know the cluster's secret."
    session_hello_seconds: Seconds = 5.0
    "Seconds after the handshake for both sides to send their hello."
    session_backlog_bytes_max: Annotated[int, Range(1_048_576, 2**40)] = 128 * 1024 * 1024
    "Unread bytes above which a peer is dropped. A message has up to 64 MiB."

    def __post_init__(self) -> None:
        check_values(self)


def wire_config(changes: Mapping[str, int | float]) -> WireConfig:
    """The defaults with the operator's changes. Raises InvalidConfig."""
    return with_changes(WireConfig, changes, "wire", "docs/limits.md")
