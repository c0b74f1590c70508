"""A router's metrics: the stats of each instance, with its name as a label, and the router's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.observe.metrics import EngineCollector, counters, gauges
from baton.protocol.instance import ClusterView, InstanceView

_HANDOFF_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ClusterCollector(Collector):
    """Metrics of a router: replaces EngineCollector. `view` is called at every scrape."""

    def __init__(self, view: Callable[[], ClusterView], sessions: Callable[[], Mapping[str, int]] = dict) -> None:
        """`sessions`: counters of the router's listener (runtime/wire/link_server.py)."""
        self._view = view
        self._sessions = sessions
        self.handoff_seconds = Histogram(
            "baton:router_handoff_seconds",
            "Seconds from the last computed block of a prompt until its request continues at the decoder.",
            buckets=_HANDOFF_SECONDS,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield from _instance_stats(view.instances)
        yield _instance_info(view.instances)
        yield from _router_stats(view)
        text = "Sessions with instances: opened ones, and failed ones by reason."
        yield counters("router_sessions", text, "event", self._sessions())
        yield from self.handoff_seconds.collect()


def _instance_stats(instances: tuple[InstanceView, ...]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for instance in instances:
        labels = {"instance": instance.name, "role": instance.role}
        for family in EngineCollector(lambda stats=instance.stats: stats).collect():  # type: ignore[misc]
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [Sample(each.name, {**each.labels, **labels}, each.value) for each in family.samples]
    yield from families.values()


def _instance_info(instances: tuple[InstanceView, ...]) -> Metric:
    info = GaugeMetricFamily(
        "baton:instance_info",
        "Start time of an instance in seconds since 1970, with its build as labels.",
        labels=["instance", "role", "version", "commit"],
    )
    for each in instances:
        info.add_metric([each.name, each.role, each.build.version, each.build.commit], each.build.started_at)
    return info


def _router_stats(view: ClusterView) -> Iterator[Metric]:
    yield GaugeMetricFamily("baton:router_queue", "Requests in the router's queue.", value=view.queued)
    yield GaugeMetricFamily("baton:router_requests_open", "Requests at the router that have not ended.", value=view.open)
    text = "Known keys of cached blocks, summed over all instances."
    yield GaugeMetricFamily("baton:router_prefix_keys", text, value=view.prefix_keys)
    states = [f"{each.role}/{each.state}" for each in view.instances]
    both = [f"{role}/{state}" for role in ("mixed", "prefill", "decode") for state in ("alive", "suspect")]
    yield gauges(
        "instances", "Connected instances, by role and state.", "role/state", {each: states.count(each) for each in both}
    )
    for name, text in (
        ("handoffs", "Requests that continued at another instance than the one that computed their prompt."),
        ("replays", "Requests sent again with their delivered tokens, after a loss or a refusal."),
        ("broken", "Attempts in which an instance broke the protocol."),
        ("broken_off", "Requests that no instance could continue."),
        ("paths_given_up", "Times that the path between two instances was marked as failed."),
        ("digest_bytes", "Bytes received as keys of cached blocks."),
        ("digest_keys_cut", "Keys of cached blocks dropped because their instance exceeded its share of the index."),
        ("instances_joined", "Sessions opened by instances."),
        ("instances_refused", "Sessions refused because the instance does not fit the others."),
    ):
        yield CounterMetricFamily(f"baton:router_{name}", text, value=view.counters.get(name, 0))
    for name, text, label, prefix in (
        ("refused", "Requests refused by the router, by reason.", "reason", "refused_"),
        ("handoff_ends", "Ended hand-offs, by result.", "outcome", "handoff_"),
        ("instances_lost", "Ended sessions of instances, by cause.", "how", "lost_"),
    ):
        found = {key.removeprefix(prefix): count for key, count in view.counters.items() if key.startswith(prefix)}
        yield counters(f"router_{name}", text, label, found)
    causes = {"stalled": view.counters.get("moved", 0), "left": view.counters.get("left", 0)}
    yield counters("router_moved", "Requests moved away from a live instance, by cause.", "cause", causes)
