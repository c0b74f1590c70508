"""Host tier, storage tier and preemption with each policy, on the GPU."""

from test_tiers import (  # noqa: F401
    test_a_prefix_that_the_device_has_lost_comes_from_the_host,
    test_a_warm_file_tier_serves_the_next_server_and_another_one_beside_it,
    test_preempted_requests_end_as_if_nothing_had_happened,
    undisturbed,
)
