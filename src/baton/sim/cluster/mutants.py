"""Mutants of hand-off and router (sim/mutants.py has the others and runs them): name, module, old text, new text, fault.

Only a cluster can kill them.
"""

from __future__ import annotations

CLUSTER_MUTANTS: tuple[tuple[str, str, str, str, str], ...] = ()  # fmt: skip
