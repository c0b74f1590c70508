"""A prefilled prompt goes from one instance to another: the table of the trip, and its two ends."""
