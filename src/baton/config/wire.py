"""Bounds of connections between the parts of a cluster: sessions of routers and instances, and the transfer of KV blocks.

Operators meet these numbers in the log and in docs/limits.md. They are changed with `--wire '{readers_max: 512}'` or a table
`wire:` in the YAML file, and GET /config shows what is in force.
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
    "Connections to the transfer port that have not proved themselves yet. One more closes the oldest."
    reader_handshake_seconds: Seconds = 2.0
    "Within this time a reader of the KV pool proves itself and says which pool it wants."
    reader_idle_seconds: Seconds = 120.0
    "A reader that asks for nothing for so long is closed. It reconnects when it needs to."
    reader_send_seconds: Seconds = 10.0
    "A reader that does not take a piece of blocks within this time is closed."
    peers_max: Connections = 256
    "KV pools of other instances that are open for reading at once. One more closes the one used longest ago."
    peer_open_seconds: Seconds = 2.0
    "Within this time one address of another instance's KV pool is opened, or the next one is tried."
    peer_idle_seconds: Seconds = 60.0
    "A KV pool of another instance that was not read for so long is closed."
    session_handshakes_max: Connections = 64
    "Connections to a router's cluster port that have not proved themselves yet. One more closes the oldest."
    session_handshake_seconds: Seconds = 5.0
    "Within this time both sides of a session prove that they know the cluster's secret."
    session_hello_seconds: Seconds = 5.0
    "Within this time after the handshake both sides send their hello."
    session_backlog_bytes_max: Annotated[int, Range(1_048_576, 2**40)] = 128 * 1024 * 1024
    "A peer that lets this many bytes wait unread is given up. A message has up to 64 MiB."

    def __post_init__(self) -> None:
        check_values(self)


def wire_config(changes: Mapping[str, int | float]) -> WireConfig:
    """The defaults, but for what the operator says."""
    return with_changes(WireConfig, changes, "wire", "docs/limits.md")
