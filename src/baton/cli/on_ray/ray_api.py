"""All calls of Ray: connect, place, find, ask, remove. Ray is optional (`pip install 'baton-serve[ray]'`) and has no types that
mypy could check, so it stays in this file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from baton.cli.on_ray.bundles import Bundle, Resources
from baton.cli.on_ray.keeper import Keeper, KeeperOrders
from baton.cli.say import Failed

NAMESPACE: Final = "baton"
ASK_SECONDS: Final = 30.0
"""Seconds for an answer of a keeper that only answers."""


class NameTaken(Failed):
    """Another command has started a cluster of this name meanwhile."""


class RayKeeper:
    """The actor, which Ray makes anew with the same orders in each of its lives."""

    def __init__(self, cluster: str, orders: KeeperOrders) -> None:
        import ray

        def peer(name: str) -> _RemoteKeeper:
            return _RemoteKeeper(ray.get_actor(f"{cluster}/{name}", namespace=NAMESPACE))

        self._keeper = Keeper(orders, ray.util.get_node_ip_address(), peer)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._keeper, method)(*arguments)


class _RemoteKeeper:
    """Calls the methods of another keeper by name."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            import ray

            return ray.get(self._actor.call.remote(method, *arguments), timeout=ASK_SECONDS)

        return call


class RayCluster:
    def __init__(self, address: str, name: str, *, insecure: bool) -> None:
        """Connect to Ray. Raises Failed with what to do."""
        try:
            import ray
        except ModuleNotFoundError:
            raise Failed("--on ray needs Ray: pip install 'baton-serve[ray]' here and on every node") from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token" and not insecure:
            raise Failed(
                "Ray runs without authentication (RAY_AUTH_MODE is not token), and it gets the cluster's secret and keys: set "
                "up token authentication, or give --ray-insecure if only you reach its ports"
            )
        self._ray, self.name = ray, name
        self._group: Any = None
        "The placement group that this command has made."
        try:
            ray.init(address=address, namespace=NAMESPACE, logging_level="error", log_to_driver=True)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            why = _first_line(error)
            raise Failed(f"--ray-address {address}: {why}; start Ray with `ray start --head`, or give its address") from None

    def disconnect(self) -> None:
        self._ray.shutdown()

    def nodes(self) -> list[Resources]:
        """Free resources of each node, as far as Ray knows."""
        from ray._private.state import available_resources_per_node

        return [dict(free) for free in available_resources_per_node().values()]

    # Keepers

    def keepers(self) -> list[str]:
        """Names of the cluster's keepers."""
        listed = self._ray.util.list_named_actors(all_namespaces=True)
        prefix = f"{self.name}/"
        return sorted(
            one["name"].removeprefix(prefix)
            for one in listed
            if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)
        )

    def place(self, bundles: Sequence[Bundle], strategy: str, seconds: float) -> bool:
        """Reserve the bundles as one. False: they do not fit within `seconds`. No bundle stays reserved then, nor after an
        error or Ctrl-C. Raises NameTaken."""
        from ray.util.placement_group import placement_group

        name, needs = f"{NAMESPACE}/{self.name}", [one.resources for one in bundles]
        try:
            self._group = placement_group(needs, strategy=strategy.upper(), name=name, lifetime="detached")
        except (self._ray.exceptions.RayError, ValueError) as error:
            raise NameTaken(
                f"Ray refuses to reserve room for a cluster {self.name} ({_first_line(error)}): another command starts it now "
                f"or was killed; `baton down --on ray --cluster-name {self.name}` releases what it has reserved"
            ) from None
        placed = False
        try:
            placed = bool(self._group.wait(timeout_seconds=seconds))
        finally:
            if not placed:
                self.release()
        return placed

    def start(self, place: int, bundle: Bundle, orders: KeeperOrders) -> None:
        """Start a keeper. Raises NameTaken."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        actor = self._ray.remote(RayKeeper).options(
            name=f"{self.name}/{orders.name}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=bundle.resources.get("CPU", 0),
            num_gpus=bundle.resources.get("GPU", 0),
            resources={kind: amount for kind, amount in bundle.resources.items() if kind not in ("CPU", "GPU")},
            scheduling_strategy=where,
        )
        try:
            actor.remote(self.name, orders)
        except ValueError as error:
            raise NameTaken(f"Ray does not start {orders.name}: {_first_line(error)}") from None

    def ask(self, name: str, method: str, *arguments: Any, seconds: float = ASK_SECONDS) -> Any:
        """Call a keeper's method. Raises Failed if the keeper does not answer in time."""
        try:
            actor = self._ray.get_actor(f"{self.name}/{name}", namespace=NAMESPACE)
            return self._ray.get(actor.call.remote(method, *arguments), timeout=seconds)
        except (self._ray.exceptions.RayError, ValueError) as error:
            raise Failed(f"{name}: {_first_line(error)}") from None

    def remove(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # the keeper is gone
            self._ray.kill(self._ray.get_actor(f"{self.name}/{name}", namespace=NAMESPACE), no_restart=True)

    def release(self) -> bool:
        """Give the reserved resources back: those of this command's group, or else of the group with the cluster's name. False:
        nothing is reserved."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        try:
            remove_placement_group(self._group or get_placement_group(f"{NAMESPACE}/{self.name}"))
        except ValueError:  # there is no such group
            return False
        self._group = None
        return True


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
