"""The benchmarks are programs and not a package: their folder is put where they would find it themselves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
