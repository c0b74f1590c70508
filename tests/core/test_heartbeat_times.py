"""Early heartbeats: soon after a request of another router, never more often than EARLY_HEARTBEAT_SECONDS."""

from __future__ import annotations

from random import Random

from baton.core.heartbeat_times import EARLY_HEARTBEAT_SECONDS, HeartbeatTimes


def test_a_request_of_another_router_is_reported_at_once_if_no_heartbeat_was_sent_lately():
    times = HeartbeatTimes(0.0, 0.25)
    times.on_sent(0.0)
    times.on_request_of_another(0.1)
    assert times.early_due == 0.1
    times.on_sent(0.1, early=True)
    assert times.early_due is None
    assert times.due == 0.25, "the regular interval is kept"


def test_requests_in_a_row_share_a_heartbeat():
    times = HeartbeatTimes(0.0, 0.25)
    times.on_sent(0.0)
    times.on_sent(0.1, early=True)
    times.on_request_of_another(0.101)
    times.on_request_of_another(0.105)
    assert times.early_due == 0.1 + EARLY_HEARTBEAT_SECONDS


def test_none_is_sent_early_where_a_regular_one_is_due_before():
    times = HeartbeatTimes(0.0, 0.25)
    times.on_sent(0.0)
    times.on_sent(0.24, early=True)
    times.on_request_of_another(0.245)
    assert times.early_due is None


def test_drawn_requests_are_reported_within_the_least_interval_and_heartbeats_keep_it():
    rng, times, now = Random(1), HeartbeatTimes(0.0, 0.25), 0.0
    sent = [0.0]
    times.on_sent(0.0)
    for _ in range(5000):
        now += rng.expovariate(200.0)
        while (due := min(times.due, times.early_due if times.early_due is not None else times.due)) <= now:
            early = due != times.due
            times.on_sent(due, early=early)
            if early:
                assert due - sent[-1] >= EARLY_HEARTBEAT_SECONDS - 1e-9
            sent.append(due)
        times.on_request_of_another(now)
        assert min(times.due, times.early_due or times.due) - now <= EARLY_HEARTBEAT_SECONDS
