"""What a router and its instances publish about sessions, losses, moves and hand-offs."""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import Metric

from baton.observe.cluster_metrics import ClusterCollector
from baton.observe.metrics import EngineCollector
from baton.protocol.control import InstanceStats
from baton.protocol.instance import Build, ClusterView, InstanceView
from baton.protocol.request import Refused
from baton.runtime.engine.worker_supervisor import StepTokens

COUNTERS = {
    "handoffs": 7,
    "moved": 2,
    "left": 3,
    "broken": 4,
    "paths_given_up": 9,
    "lost_silent": 1,
    "lost_left": 5,
    "handoff_adopted": 7,
    "handoff_decode_lost": 6,
    "refused_queue_full": 8,
}


def samples(metrics: list[Metric]) -> dict[str, float]:
    """As lines of the page would be."""
    found = {}
    for metric in metrics:
        for name, labels, value, *_ in metric.samples:
            found[name + "".join(f"{{{key}={label}}}" for key, label in sorted(labels.items()))] = value
    return found


def test_a_router_tells_losses_moves_hand_offs_and_sessions():
    stats = InstanceStats(routers=1, router_sessions={"opened": 2}, handoffs={"adopted": 9})
    view = ClusterView("r", "serving", instances=(InstanceView("d0", "decode", "alive", stats=stats),), counters=COUNTERS)
    told = samples(list(ClusterCollector(lambda: view, lambda: Counter(opened=3, mac=1)).collect()))
    assert told["baton:router_moved_total{cause=stalled}"] == 2
    assert told["baton:router_moved_total{cause=left}"] == 3
    assert told["baton:router_instances_lost_total{how=silent}"] == 1
    assert told["baton:router_instances_lost_total{how=left}"] == 5
    assert told["baton:router_handoff_ends_total{outcome=adopted}"] == 7
    assert told["baton:router_handoff_ends_total{outcome=decode_lost}"] == 6
    assert told["baton:router_refused_total{reason=queue_full}"] == 8
    assert told["baton:router_broken_total"] == 4
    assert told["baton:router_paths_given_up_total"] == 9
    assert told["baton:router_sessions_total{event=opened}"] == 3
    assert told["baton:router_sessions_total{event=mac}"] == 1
    assert told["baton:instance_sessions_total{event=opened}{instance=d0}{role=decode}"] == 2
    assert told["baton:instance_handoffs_total{instance=d0}{role=decode}{what=adopted}"] == 9


def test_an_instance_tells_its_sessions_and_hand_offs_where_it_has_routers():
    stats = InstanceStats(
        routers=2,
        router_sessions={"opened": 3, "lapsed": 1},
        handoffs={"handed_over": 4},
        pulls={"tcp/copied": 5, "tcp/unreachable": 2},
        pull_bytes={"tcp": 4096},
        pull_microseconds={"tcp": 1_500_000},
        readers={"unix/evicted": 1},
    )
    told = samples(list(EngineCollector(lambda: stats).collect()))
    assert told["baton:instance_routers"] == 2
    assert told["baton:instance_sessions_total{event=lapsed}"] == 1
    assert told["baton:instance_handoffs_total{what=handed_over}"] == 4
    assert told["baton:kv_pulls_total{outcome=unreachable}{transport=tcp}"] == 2
    assert told["baton:kv_pull_bytes_total{transport=tcp}"] == 4096
    assert told["baton:kv_pull_seconds_total{transport=tcp}"] == 1.5
    assert told["baton:kv_readers_total{event=evicted}{transport=unix}"] == 1
    alone = samples(list(EngineCollector(InstanceStats).collect()))
    assert not [name for name in alone if name.startswith(("baton:instance_", "baton:kv_pull", "baton:kv_readers"))]


def test_a_router_that_has_nobody_counts_no_losses_of_a_worker():
    """It never saw one; an instance that gave its worker up says how often."""
    assert "0 times" not in str(Refused("worker_gone"))
    assert "lost 6 times in a row (limit 5)" in str(Refused("worker_gone", 6, 5))


def test_instances_tell_their_build_loop_lag_restarts_and_steps():
    table = StepTokens()
    for tokens in (1, 1, 3, 40_000):
        table.observe(tokens)
    stats = InstanceStats(
        worker_losses=3,
        cache_losses=2,
        loop_lag_microseconds=1500,
        cache_loop_lag_microseconds=2500,
        step_tokens=table.table(),
    )
    view = InstanceView("d0", "decode", "alive", stats=stats, build=Build("1.2", "c0ffee", 1e9))
    told = samples(list(ClusterCollector(lambda: ClusterView("r", "serving", instances=(view,))).collect()))
    labels = "{instance=d0}"
    assert told[f"baton:instance_info{{commit=c0ffee}}{labels}{{role=decode}}{{version=1.2}}"] == 1e9
    assert told[f"baton:engine_loop_lag_seconds{labels}{{process=engine}}{{role=decode}}"] == 0.0015
    assert told[f"baton:engine_loop_lag_seconds{labels}{{process=cache}}{{role=decode}}"] == 0.0025
    assert told[f"baton:child_restarts_total{{child=worker}}{labels}{{role=decode}}"] == 3
    assert told[f"baton:child_restarts_total{{child=cache}}{labels}{{role=decode}}"] == 2
    at_most = {
        bound: told[f"baton:step_tokens_bucket{labels}{{le={bound}}}{{role=decode}}"] for bound in ("1", "2", "4", "+Inf")
    }
    assert at_most == {"1": 2, "2": 2, "4": 3, "+Inf": 4}
    assert told[f"baton:step_tokens_sum{labels}{{role=decode}}"] == 40_005
    assert told[f"baton:step_tokens_count{labels}{{role=decode}}"] == 4
