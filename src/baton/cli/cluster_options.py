"""Options of `baton router` and `baton up` besides those of `baton serve`. Each field is a flag and a YAML key."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from baton.config import CredentialOptions, HandoffOptions, PlacementPolicy, Role, RouterConfig, ServeConfig
from baton.config.parts import part_of, with_changes
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

_OURS = tuple(field.name for field in fields(HandoffOptions))
_BY_OTHER_OPTIONS = ("policy", "order", "queue_requests_max", "queue_tokens_max", *_OURS)
"""Fields of RouterConfig with an option of their own. The others are keys of `router_limits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOptions(HandoffOptions):
    """Placement of requests on instances."""

    placement: PlacementPolicy = RouterConfig().policy
    """Which instance gets a request. prefix: where the least is left to compute, cached tokens considered. load: the least
    loaded, in tokens."""
    router_limits: dict[str, int | float] = field(default_factory=dict)
    "Counts and times of the router that differ from those of docs/cluster.md, as YAML: {lapse_seconds: 5}."

    def __post_init__(self) -> None:
        check_values(self)
        with_changes(RouterConfig, self.router_limits, "router_limits", "docs/cluster.md", _BY_OTHER_OPTIONS)

    def router(self, serve: ServeConfig) -> RouterConfig:
        ours: dict[str, Any] = {name: getattr(self, name) for name in _OURS}
        return part_of(serve, RouterConfig, policy=self.placement, **ours, **self.router_limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOptions(CredentialOptions):
    """Address and credentials with which `baton router` accepts instances."""

    cluster_host: str = "127.0.0.1"
    "Address on which instances are expected. A program that reaches it needs the secret."
    cluster_port: Annotated[int, Range(0, 65_535)] = 8100
    "Port on which instances are expected (baton serve --router tcp://HOST:PORT). 0: a free port."

    def __post_init__(self) -> None:
        check_values(self)
        self.check_credentials()


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Where `baton up` runs its instances."""

    on: Literal["here", "ray"] = "here"
    """here: on this machine. ray: on the nodes of a Ray cluster, which places them and replaces lost ones. Each node needs
    Baton and the model under the same name or path."""
    cluster_name: str = "baton"
    "On Ray: name of the cluster."
    ray_address: str = "auto"
    "On Ray: its address, HOST:PORT. auto: the Ray of this machine."
    ray_strategy: Literal["spread", "strict_spread", "pack"] = "spread"
    "On Ray: instances on different nodes where possible (spread), or in any case (strict_spread), or on few nodes (pack)."
    attach: bool = False
    "On Ray: wait for a cluster of that name, which runs already, and end it at Ctrl-C."
    detach: bool = False
    "On Ray: return when the cluster is ready. `baton down --on ray` ends it."
    ray_insecure: bool = False
    "On Ray: use it without token authentication. It gets the cluster's secret and the keys of the API."

    def __post_init__(self) -> None:
        check_values(self)
        if self.attach and self.detach:
            raise InvalidConfig("attach and detach exclude each other: give one of them")
        if not self.cluster_name or "/" in self.cluster_name:
            raise InvalidConfig("cluster_name must be a name without /")


INSTANCES_MAX = 64
"""Maximum of instances per role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    """Instances that `baton up` starts."""

    prefill: Annotated[int, Range(0, INSTANCES_MAX)] = 0
    "Instances that compute prompts."
    decode: Annotated[int, Range(0, INSTANCES_MAX)] = 0
    "Instances that generate, from prompts that others have computed."
    mixed: Annotated[int, Range(0, INSTANCES_MAX)] = 0
    "Instances that do both. Where none of the three is given: one per GPU, or 2 on the CPU."

    def __post_init__(self) -> None:
        check_values(self)
        if self.prefill and not self.decode + self.mixed:
            raise InvalidConfig("decode is 0, and so is mixed: no instance would generate (give --decode 1, or --mixed 1)")

    def roles(self) -> dict[str, Role]:
        """Roles of the instances, by name."""
        counts: tuple[tuple[Role, int], ...] = (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return {f"{role}-{number}": role for role, count in counts for number in range(count)}

    def or_default(self, gpus: int) -> UpOptions:
        """The roles without any count: one mixed instance per GPU, or two on the CPU."""
        return self if self.prefill + self.decode + self.mixed else UpOptions(mixed=min(gpus, INSTANCES_MAX) or 2)
