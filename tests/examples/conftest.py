"""Examples are run as their readers run them: in processes of their own, with only what their pages name."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "kvcache"), str(TESTS / "chaos"), str(TESTS / "runtime")]
