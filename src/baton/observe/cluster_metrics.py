"""A router's metrics: what each instance tells of itself, with its name as a label, and what the router counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.observe.metrics import EngineCollector
from baton.protocol.node import ClusterView, InstanceView

_HANDOFF_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ClusterCollector(Collector):
    """In place of EngineCollector. `view` is asked when someone scrapes."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view
        self.handoff_seconds = Histogram(
            "baton:router_handoff_seconds",
            "From the last block of a prompt computed to its request going on at another instance.",
            buckets=_HANDOFF_SECONDS,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield from _of_instances(view.instances)
        yield from _of_router(view)
        yield from self.handoff_seconds.collect()


def _of_instances(instances: tuple[InstanceView, ...]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for instance in instances:
        labels = {"instance": instance.name, "role": instance.role}
        for family in EngineCollector(lambda stats=instance.stats: stats).collect():  # type: ignore[misc]
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [Sample(each.name, {**each.labels, **labels}, each.value) for each in family.samples]
    yield from families.values()


def _of_router(view: ClusterView) -> Iterator[Metric]:
    yield GaugeMetricFamily("baton:router_queue", "Requests that no instance has yet.", value=view.queued)
    yield GaugeMetricFamily("baton:router_requests_open", "Requests owed an end.", value=view.open)
    states = GaugeMetricFamily("baton:instances", "Instances by role and state.", labels=["role", "state"])
    for role in ("mixed", "prefill", "decode"):
        for state in ("alive", "suspect"):
            states.add_metric([role, state], sum((each.role, each.state) == (role, state) for each in view.instances))
    yield states
    for name, text in (
        ("handoffs", "Requests that went on at another instance than the one that computed their prompt."),
        ("replays", "Requests sent again with what their client had, after a loss or a refusal."),
        ("broken_off", "Requests that no instance could go on with."),
        ("instances_joined", "Sessions of instances that began."),
        ("instances_lost", "Sessions of instances that ended."),
        ("instances_refused", "Instances that do not fit the others."),
    ):
        yield CounterMetricFamily(f"baton:router_{name}", text, value=view.counters.get(name, 0))
    refused = CounterMetricFamily("baton:router_refused", "Requests turned away by the router.", labels=["reason"])
    for name, count in view.counters.items():
        if name.startswith("refused_"):
            refused.add_metric([name.removeprefix("refused_")], count)
    yield refused
