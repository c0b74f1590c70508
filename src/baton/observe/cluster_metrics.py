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
    """Replaces EngineCollector in a router. `view` is called at every scrape."""

    def __init__(self, view: Callable[[], ClusterView], sessions: Callable[[], Mapping[str, int]] = dict) -> None:
        """`sessions`: counters of the router's listener (runtime/wire/link_server.py)."""
        self._view = view
        self._sessions = sessions
        self.handoff_seconds = Histogram(
            "baton:router_handoff_seconds",
            "From the last block of a prompt computed to its request going on at another instance.",
            buckets=_HANDOFF_SECONDS,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield from _of_instances(view.instances)
        yield _instance_info(view.instances)
        yield from _of_router(view)
        text = "Sessions that began (opened), and those that failed, by why."
        yield counters("router_sessions", text, "event", self._sessions())
        yield from self.handoff_seconds.collect()


def _of_instances(instances: tuple[InstanceView, ...]) -> Iterator[Metric]:
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
        "Start time in seconds since 1970; the labels say which build an instance runs.",
        labels=["instance", "role", "version", "commit"],
    )
    for each in instances:
        info.add_metric([each.name, each.role, each.build.version, each.build.commit], each.build.started_at)
    return info


def _of_router(view: ClusterView) -> Iterator[Metric]:
    yield GaugeMetricFamily("baton:router_queue", "Requests that no instance has yet.", value=view.queued)
    yield GaugeMetricFamily("baton:router_requests_open", "Requests owed an end.", value=view.open)
    text = "Keys of cached blocks that the router knows, of all instances together."
    yield GaugeMetricFamily("baton:router_prefix_keys", text, value=view.prefix_keys)
    states = [f"{each.role}/{each.state}" for each in view.instances]
    both = [f"{role}/{state}" for role in ("mixed", "prefill", "decode") for state in ("alive", "suspect")]
    yield gauges("instances", "Instances by role and state.", "role/state", {each: states.count(each) for each in both})
    for name, text in (
        ("handoffs", "Requests that went on at another instance than the one that computed their prompt."),
        ("replays", "Requests sent again with what their client had, after a loss or a refusal."),
        ("broken", "Attempts in which an instance did not do what it should."),
        ("broken_off", "Requests that no instance could go on with."),
        ("paths_given_up", "Times that prompts were found not to arrive from one instance at another."),
        ("digest_bytes", "Bytes of keys of cached blocks that instances have sent."),
        ("digest_keys_cut", "Keys dropped because their instance sent more than its share of the router's index."),
        ("instances_joined", "Sessions of instances that began."),
        ("instances_refused", "Instances that do not fit the others."),
    ):
        yield CounterMetricFamily(f"baton:router_{name}", text, value=view.counters.get(name, 0))
    for name, text, label, prefix in (
        ("refused", "Requests turned away by the router.", "reason", "refused_"),
        ("handoff_ends", "Hand-offs that were begun, by what became of them.", "outcome", "handoff_"),
        ("instances_lost", "Sessions of instances that ended, by how.", "how", "lost_"),
    ):
        found = {key.removeprefix(prefix): count for key, count in view.counters.items() if key.startswith(prefix)}
        yield counters(f"router_{name}", text, label, found)
    causes = {"stalled": view.counters.get("moved", 0), "left": view.counters.get("left", 0)}
    yield counters("router_moved", "Requests moved away from an instance that lives, by why.", "cause", causes)
