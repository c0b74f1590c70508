"""Everything that disturbs a run at once, on the GPU; the oracle is one request at a time, on the GPU too."""

from test_equality import expected, test_every_token_is_that_of_the_undisturbed_run  # noqa: F401
