"""The pages of /metrics, with every metric that an instance or a router can have."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.observe.cluster_metrics import ClusterCollector
from baton.observe.metrics import Metrics
from baton.protocol.control import InstanceStats
from baton.protocol.instance import Build, ClusterView, InstanceView

COUNTS = {"x": 1}
STATS = InstanceStats(
    router_sessions=COUNTS,
    handoffs=COUNTS,
    tiers=COUNTS,
    storage=COUNTS,
    drafts={"rows": 1, "tokens": 1, "0": 1},
    step_tokens={"+Inf": 1, "sum": 1},
    pulls={"tcp/copied": 1},
    readers={"tcp/opened": 1},
    pull_bytes=COUNTS,
    pull_microseconds=COUNTS,
    storage_circuit="closed",
    storage_write_circuit="closed",
    host_blocks=1,
    cache_service=True,
)
VIEW = ClusterView(
    "r",
    "serving",
    instances=(InstanceView("d", "decode", "alive", stats=STATS),),
    counters={"refused_x": 1, "handoff_adopted": 1, "lost_silent": 1},
)


def cluster_collector() -> ClusterCollector:
    return ClusterCollector(lambda: VIEW, lambda: COUNTS)


def instance_page() -> str:
    instance = Metrics(model_name="m", engine_stats=lambda: STATS)
    instance.about_process("front", lambda: 0.0, Build())
    return instance.exposition().decode()


def cluster_page() -> str:
    """Only the metrics that a router has in place of an engine's."""
    registry = CollectorRegistry()
    registry.register(cluster_collector())
    return generate_latest(registry).decode()


def router_samples() -> dict[str, set[str]]:
    """Names of labels by name of sample, on the page of a router that has answered."""
    router = Metrics(model_name="m", engine_stats=lambda: STATS, engine=cluster_collector())
    router.about_process("router", lambda: 0.0, Build())
    router.http_response("/v1/completions", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(router.exposition().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
