"""Executors of steps: base.py has the interface, stepwise.py implements it with a forward pass on the host (../forward/)."""
