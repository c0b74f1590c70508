from baton.core.restarts import HEALTHY_SECONDS, Restarts


def test_restarts_in_a_row_wait_longer_and_end():
    restarts = Restarts(4, backoff_seconds_max=0.3)
    assert [restarts.next_delay(1.0) for _ in range(5)] == [0.0, 0.1, 0.2, 0.3, None]
    assert restarts.next_delay(HEALTHY_SECONDS) == 0.0
    assert restarts.next_delay(0.0) == 0.1
    assert Restarts(0, 1.0).next_delay(HEALTHY_SECONDS) is None


def test_a_loss_that_does_not_count_makes_the_next_start_wait_all_the_same():
    restarts = Restarts(1, backoff_seconds_max=0.3)
    assert [restarts.next_delay(counts=False) for _ in range(3)] == [0.0, 0.1, 0.2]
    assert (restarts.next_delay(), restarts.losses, restarts.next_delay()) == (0.3, 1, None)
    restarts.clear()
    assert restarts.next_delay() == 0.0
