"""Metrics and logs for operators, never with prompts, outputs or keys."""
