"""The circuit breaker of a lower tier, in virtual time."""

from dataclasses import replace
from random import Random
from typing import get_args

import pytest

from baton.config import CircuitConfig
from baton.core.kv.circuit import Circuit, CircuitState

CONFIG = CircuitConfig(failures_max=3, open_seconds=1.0, open_seconds_max=8.0, probe_seconds_max=5.0)


@pytest.fixture
def circuit():
    return Circuit(CONFIG)


def fail(circuit, now, times=1):
    for _ in range(times):
        circuit.failed(circuit.admit(now), now)


def test_it_opens_after_failures_in_a_row(circuit):
    fail(circuit, 0.0, 2)
    assert circuit.state == "closed"
    fail(circuit, 0.0)
    assert circuit.state == "open"
    assert circuit.admit(0.5) is None
    assert circuit.opened_total == 1


def test_the_fault_is_that_of_the_last_failure(circuit):
    assert circuit.fault == ""
    circuit.failed(circuit.admit(0.0), 0.0)
    assert circuit.fault == "it takes too long"
    circuit.ended(circuit.admit(0.0), "no route to host", 0.0)
    circuit.succeeded(circuit.admit(0.0))
    assert circuit.fault == "no route to host", "it says what was wrong last, also when all is well again"


def test_a_success_ends_the_row(circuit):
    for _ in range(10):
        fail(circuit, 0.0, 2)
        circuit.succeeded(circuit.admit(0.0))
    assert circuit.state == "closed"


def test_one_probe_goes_when_the_wait_is_over(circuit):
    fail(circuit, 0.0, 3)
    assert circuit.admit(0.99) is None
    probe = circuit.admit(1.0)
    assert probe is not None
    assert circuit.state == "half_open"
    assert circuit.admit(1.0) is None, "one at a time"
    circuit.succeeded(probe)
    assert circuit.state == "closed"
    fail(circuit, 2.0, 2)
    assert circuit.state == "closed", "old failures do not count"


def test_the_wait_doubles_with_every_failed_probe_up_to_its_bound(circuit):
    fail(circuit, 0.0, 3)
    now, waits = 0.0, []
    for _ in range(5):
        begin = now
        while (probe := circuit.admit(now)) is None:
            now += 0.25
        waits.append(now - begin)
        circuit.failed(probe, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert circuit.opened_total == 1
    circuit.succeeded(circuit.admit(now + 8.0))
    fail(circuit, 100.0, 3)
    assert circuit.admit(101.0) is not None, "after a success the wait is short again"


def test_a_probe_that_never_comes_back_counts_as_failed(circuit):
    fail(circuit, 0.0, 3)
    lost = circuit.admit(1.0)
    assert circuit.admit(5.9) is None
    assert circuit.admit(6.0) is None
    assert circuit.state == "open"
    circuit.succeeded(lost)
    assert circuit.state == "open", "too late"
    assert circuit.admit(8.0) is not None


def test_attempts_of_before_it_opened_are_inert(circuit):
    late = [circuit.admit(0.0) for _ in range(5)]
    fail(circuit, 0.0, 3)
    circuit.succeeded(late[0])
    assert circuit.state == "open"
    probe = circuit.admit(1.0)
    circuit.failed(late[1], 1.0)
    assert circuit.state == "half_open"
    circuit.succeeded(probe)
    for attempt in late[2:]:
        circuit.failed(attempt, 1.0)
    assert circuit.state == "closed"
    assert "0 failures" in repr(circuit)


def test_a_permit_ends_once(circuit):
    permit = circuit.admit(0.0)
    for _ in range(10):
        circuit.failed(permit, 0.0)
    assert circuit.state == "closed", "one failure, however often it is said"
    assert "1 failures" in repr(circuit)
    circuit.succeeded(permit)
    assert "1 failures" in repr(circuit), "nor does it succeed afterwards"
    assert circuit.permits == 0


def test_a_probe_that_was_never_carried_out_is_sent_again(circuit):
    fail(circuit, 0.0, 3)
    probe = circuit.admit(1.0)
    circuit.cancelled(probe, 1.5)
    assert circuit.state == "open"
    assert circuit.admit(1.5) is not None, "nothing was learned, so the wait is not longer"
    circuit.cancelled(probe, 1.6)
    assert circuit.state == "half_open", "that permit has ended"


def test_a_cancelled_permit_counts_as_nothing(circuit):
    fail(circuit, 0.0, 2)
    circuit.cancelled(circuit.admit(0.0), 0.0)
    assert circuit.state == "closed"
    fail(circuit, 0.0)
    assert circuit.state == "open"


def test_permits_that_never_end_are_bounded():
    circuit = Circuit(replace(CONFIG, permits_max=8))
    given = [circuit.admit(0.0) for _ in range(20)]
    assert circuit.permits == 8
    assert len(set(given)) == 20
    for permit in given[:12]:
        circuit.failed(permit, 0.0)
    assert circuit.state == "closed", "those are forgotten"
    for permit in given[12:15]:
        circuit.failed(permit, 0.0)
    assert circuit.state == "open"
    assert circuit.permits == 0


def test_any_history_asks_a_dead_backend_rarely_and_finds_a_living_one_again():
    for seed in range(50):
        random, circuit = Random(seed), Circuit(CONFIG)
        now, asked = 0.0, 0
        for _ in range(2000):
            now += random.random() / 10
            attempt = circuit.admit(now)
            if attempt is not None:
                asked += 1
                if random.random() < 0.9:  # Some are never answered.
                    circuit.failed(attempt, now + random.random())
            assert circuit.state in get_args(CircuitState)
        assert asked < 60
        attempt = circuit.admit(now + 20) or circuit.admit(now + 40)
        circuit.succeeded(attempt)
        assert circuit.state == "closed"
