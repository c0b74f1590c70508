"""Triton kernels. Each file says what its kernel computes and has a function that launches it; plain.py has the oracles.

Kernels of several programs per result end with the *last arriver*: every program stores its part, then counts itself in; who
counts last combines the parts and sets the counter back to zero. That saves a launch. The order of the parts is fixed, so the
bits do not depend on who is last.
"""
