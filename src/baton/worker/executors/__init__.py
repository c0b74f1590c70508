"""What computes a step: base.py says what it is asked, stepwise.py does it with a forward pass on the host (../forward/)."""
