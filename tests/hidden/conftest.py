"""sitecustomize.py of this folder is on the path of the hidden stage only; its tests import it in every stage."""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("sitecustomize", Path(__file__).with_name("sitecustomize.py"))
assert spec is not None
assert spec.loader is not None
sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["sitecustomize"])
