"""The process that answers HTTP, and its client of the engine."""
