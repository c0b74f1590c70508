"""DECIDES. Pure state machines: no clock, chance, IO, thread, torch or logging (tests/layers holds the list)."""
