"""`baton up --prefill 1 --decode 1 --device cuda`: prompts go from pool to pool on one GPU."""

from test_up import *  # noqa: F403
