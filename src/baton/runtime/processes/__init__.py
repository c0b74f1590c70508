"""Child processes: start, watch, restart and end; the table of all of them."""
