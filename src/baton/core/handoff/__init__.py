"""A prefilled prompt goes from one instance to another: the table of the routed request, and its two ends."""
