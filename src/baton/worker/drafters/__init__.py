"""Drafters: they propose tokens that a step verifies (base.py)."""
