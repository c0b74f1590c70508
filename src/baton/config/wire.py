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
    "Instances that may read this one's KV pool at once, per transport. One more closes the connection that is idle longest."
    reader_handshakes_max: Connections = 32
    "Unauthenticated connections to the transfer port. Beyond it the oldest is closed."
    reader_handshake_seconds: Seconds = 2.0
    "How long a reader of the KV pool may take to authenticate and name the pool."
    reader_idle_seconds: Seconds = 120.0
    "A reader without a request for this long is closed. It reconnects when needed."
    reader_send_seconds: Seconds = 10.0
    "A reader that does not receive a piece of blocks within this time is closed."
    peers_max: Connections = 256
    "Open KV pools of other instances. Beyond it the least recently used one is closed."
    peer_open_seconds: Seconds = 2.0
    "Time to open one address of another instance's KV pool before the next one is tried."
    peer_idle_seconds: Seconds = 60.0
    "A KV pool of another instance that was not read for this long is closed."
    session_handshakes_max: Connections = 64
    "Unauthenticated connections to a router's cluster port. Beyond it the oldest is closed."
    session_handshake_seconds: Seconds = 5.0
    "Time for both sides of a session to prove that they know the cluster's secret."
    session_hello_seconds: Seconds = 5.0
    "Time after the handshake for both sides to send their hello."
    session_backlog_bytes_max: Annotated[int, Range(1_048_576, 2**40)] = 128 * 1024 * 1024
    "A peer with this many unread bytes is dropped. A message has up to 64 MiB."

    def __post_init__(self) -> None:
        check_values(self)


def wire_config(changes: Mapping[str, int | float]) -> WireConfig:
    """The defaults with the operator's changes. Raises InvalidConfig."""
    return with_changes(WireConfig, changes, "wire", "docs/limits.md")
