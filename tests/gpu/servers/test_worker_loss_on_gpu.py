"""A worker on the GPU that is killed, stands still, or is killed by its request."""

from test_worker_loss import (  # noqa: F401
    server,
    test_a_request_that_kills_its_worker_is_given_up_and_the_next_one_is_served,
    test_killed_and_stalled_workers_change_nothing,
)
