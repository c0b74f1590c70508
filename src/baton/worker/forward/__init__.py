"""The forward pass: base.py has the interface, each other file an implementation."""
