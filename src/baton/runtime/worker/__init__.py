"""The worker process: receives plans, computes steps."""
