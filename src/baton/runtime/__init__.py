"""RUNS: one folder per OS process (front, router, engine, worker, cache) and shared parts. driver.py is the only event loop."""
