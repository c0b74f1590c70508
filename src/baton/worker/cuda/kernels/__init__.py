"""Triton kernels. Each file documents its kernel and has a function that launches it; tests/gpu/plain.py has the oracles.

Kernels of several programs per result end with the *last arriver*: every program stores its part, then increments a counter;
the last one combines the parts and resets the counter. That saves a launch. The order of the parts is fixed, so the bits do not
depend on which program is last.
"""
