"""SIMULATES: the real core in virtual time, with a modelled worker, clients, clock, and faults."""
