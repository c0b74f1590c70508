"""Shared with the runtime tests: pairs of sockets, sessions, small models, and no descriptor left open."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS / "runtime"), str(TESTS / "chaos")]

from descriptor_check import no_descriptor_is_kept  # noqa: E402, F401
