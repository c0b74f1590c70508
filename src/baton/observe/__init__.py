"""What operators see: numbers (metrics.py), never prompts, outputs or keys."""
