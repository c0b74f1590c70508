"""The two ends of a hand-off: a prefilled prompt moves from one instance to another."""
