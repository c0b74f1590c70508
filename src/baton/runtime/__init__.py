"""RUNS: one file an OS process (supervisor, front, engine, worker), and what they are made of. driver.py is the only loop."""
