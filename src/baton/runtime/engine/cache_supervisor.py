"""The engine's cache service in all of its lives: its hello must match the state of the instance.

The engine creates the directory in which other instances find our pool, and the ports for those of other machines. The
service may be killed at any moment: both outlive it, and its successor serves the same addresses.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from baton.config import EngineConfig, TiersConfig
from baton.core.effects import RestartCache, SendToCache
from baton.core.events import CacheLost, CacheReady
from baton.core.startup import StartupPlan
from baton.errors import InvalidConfig, PeerError
from baton.kvpool.memory import GIB, main_memory
from baton.protocol.control import CacheHello, CacheStats, InstanceStats
from baton.protocol.moves import StorageIdentity, StorageQuery
from baton.protocol.pool import ReadersSocket
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.rank_messages import for_rank
from baton.runtime.engine.startup import Startup
from baton.runtime.engine.transfer_port import TransferPorts
from baton.runtime.processes.child import Child
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.processes.private_folder import PrivateFolder, peer_folder
from baton.runtime.wire.descriptors import send_descriptor

logger = logging.getLogger("baton.engine")

CACHE = "cache"
TRANSFER_COUNTERS: Final = ("pulls", "pull_bytes", "pull_microseconds", "readers")
"""Fields of CacheStats, and of InstanceStats by the same names."""


class CacheSupervisor:
    def __init__(
        self,
        plan: StartupPlan,
        children: ChildSet[EngineConfig],
        machine: InstanceLoop,
        startup: Startup,
        ranks: int = 1,
    ) -> None:
        self._plan = plan
        self._children = children
        self._machine = machine
        self._startup = startup
        self._ranks = ranks
        self._folder: PrivateFolder | None = None
        self._ports: TransferPorts | None = None
        self._early: CacheHello | None = None
        "Hello that arrived before the end of the start."
        self.counters: dict[str, int] = {}
        "Counters of the service's storage, as last reported."
        self._transfers = CacheStats({})
        "Counters of the present life, as last reported."
        self._losses = 0
        self._earlier: dict[str, Counter[str]] = {name: Counter() for name in TRANSFER_COUNTERS}
        "Counters of earlier lives."
        self._totals: dict[str, dict[str, int]] = {}
        "Counters of all lives: added up when the service reports, which is less often than they are read."
        self._identified: tuple[int, bytes] | None = None
        "The life of the service, and the identity that it was sent."
        self._failing: set[str] = set()
        "Directions (read, write) in which storage is not used, as logged."

    @property
    def needed(self) -> bool:
        """Whether the engine has a cache service."""
        return CACHE in self._plan.processes

    @property
    def peer(self) -> str:
        """Where other instances may read our pool, the best way first: the same in all lives of the service, except the port,
        which may be opened later. A line for each of several ranks. Empty: nowhere."""
        lines = [" ".join(self._addresses(rank)) for rank in range(self._ranks)]
        return "\n".join(lines) if any(lines) else ""

    def _addresses(self, rank: int) -> list[str]:
        folder, ports = self._folder, self._ports
        near = [] if folder is None else [folder.address if self._ranks == 1 else folder.address_of(rank)]
        return [*near, *([] if ports is None else ports.addresses[rank : rank + 1])]

    def make_folder(self) -> None:
        if self.needed:
            self._folder = peer_folder(needed=self._plan.creator == "messenger")

    def open_ports(self, given: EngineConfig) -> None:
        if self.needed and given.cluster_secret:
            self._ports = TransferPorts(given.transfer_address, given.routers, given.transfer_announce, self._ranks)

    @property
    def reads_others(self) -> bool:
        """There is a messenger: prompts can be handed over."""
        return self.needed and (self._ports is not None or bool(self.peer))

    def reached(self, host: str, *, on_gpu: bool) -> bool:
        """A session with a router leaves from this address of ours. True: our pool is announced at another address from now
        on."""
        ports = self._ports
        if ports is None or not ports.reached(host, on_gpu=on_gpu):
            return False
        logger.info("other instances may read our KV pool at %s", ", ".join(ports.addresses))
        if (cache := self._children.get(CACHE)) is not None:
            self.on_started(cache)
        return True

    def on_started(self, child: Child) -> None:
        """Send each rank of a new service its port's socket, before anything else."""
        if child.name != CACHE or self._ports is None:
            return
        for rank, sock in zip(child.ranks, self._ports.socks, strict=False):  # no sockets: nothing is opened yet
            if rank.descriptors is not None:
                address = "".join(self._ports.addresses[rank.rank : rank.rank + 1])
                send_descriptor(rank.descriptors, ReadersSocket(address), sock.fileno())

    def refuse_more_than_memory(self, tiers: TiersConfig) -> None:
        """Refuse before anything is started. The service checks the free memory too; but the state of this many blocks would
        fill the memory before it does."""
        total = main_memory().total_bytes / GIB
        if self.needed and tiers.kv_host_gib > total:
            raise InvalidConfig(
                f"kv_host_gib is {tiers.kv_host_gib:g}, and this machine has {total:.1f} GiB of memory: lower it"
            )

    def close(self) -> None:
        """Remove folder and ports; the service has ended."""
        if self._folder is not None:
            self._folder.remove()
        if self._ports is not None:
            self._ports.close()

    def on_hello(self, hello: CacheHello) -> None:
        instance = self._machine.instance
        if instance is None:
            self._early = hello
            self._startup.reach("ready", CACHE)
            return
        expected = instance.board.tiers.host.total
        if hello.host_blocks != expected:
            raise PeerError(f"the cache service has {hello.host_blocks} host blocks, and {expected} are expected")
        if not set(hello.peer.split()) <= set(self.peer.split()):  # the service may not have received the port yet
            raise PeerError("the cache service lets others read our pool elsewhere than it was ordered to")
        self._machine.dispatch(CacheReady(hello.kept, hello.wants_tokens))

    def on_begun(self) -> None:
        """Handle an early hello: the instance exists now."""
        if self._early is not None:
            self.on_hello(self._early)

    def on_stats(self, stats: CacheStats) -> None:
        self.counters = stats.counters
        self._transfers = stats
        self._totals = {name: dict(self._earlier[name] + Counter(getattr(stats, name))) for name in TRANSFER_COUNTERS}

    def add_counters(self, stats: InstanceStats) -> None:
        """Add the transfer counters of all lives of the service: counters never decrease."""
        stats.cache_losses = self._losses
        stats.cache_loop_lag_microseconds = self._transfers.loop_lag_microseconds
        for name, total in self._totals.items():
            setattr(stats, name, total)

    def on_lost(self) -> None:
        """Report a service that was lost after the start: a loss before ends the start."""
        self._losses += 1
        for name in TRANSFER_COUNTERS:
            self._earlier[name].update(getattr(self._transfers, name))
        self._transfers = CacheStats({})
        self._machine.dispatch(CacheLost())

    def log_storage_changes(self) -> None:
        """Log when an open circuit stops the use of storage, and when storage is used again. Requests do not show it: they
        compute."""
        if (instance := self._machine.instance) is None:
            return
        tiers = instance.board.tiers
        for way, circuit in (("read", tiers.read_circuit), ("write", tiers.write_circuit)):
            if circuit.state == "open" and way not in self._failing:
                self._failing.add(way)
                logger.warning("KV storage is left alone for a while, to %s: %s", way, circuit.fault)
            elif circuit.state == "closed" and way in self._failing:
                self._failing.remove(way)
                logger.warning("KV storage is used again, to %s", way)

    # Effects of the instance

    def send(self, effect: SendToCache) -> None:
        if (cache := self._children.get(CACHE)) is not None:
            self._identify(cache)
            if self._ranks == 1 or isinstance(effect.message, StorageQuery) or not effect.message.pool:
                cache.control.send(effect.message)
                return
            for rank in cache.ranks:
                rank.control.send(for_rank(effect.message, rank.rank, self._ranks))

    def _identify(self, cache: Child) -> None:
        """Send the identity of the present weights, before the first message that depends on it."""
        instance = self._machine.instance
        if instance is not None and self._identified != (identified := (cache.life, instance.fingerprint)):
            self._identified = identified
            cache.control.send(StorageIdentity(instance.fingerprint))

    def restart(self, effect: RestartCache) -> None:
        """Kill the service: its end is handled like any other, and another one is started."""
        logger.warning("the cache service is killed: %s", effect.reason)
        if (cache := self._children.get(CACHE)) is not None:
            cache.kill()
