"""Mutants of the lower tiers (mutants.py has the others and runs them): name, module, old text, new text, fault.

Only a scenario with a cache service can kill them.
"""

from __future__ import annotations

TIER_MUTANTS: tuple[tuple[str, str, str, str, str], ...] = ()
