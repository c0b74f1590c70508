"""The overlay `gpu` of deploy/kubernetes on a GPU: every pod is replaced under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_pods import replace_every_pod, undisturbed

__all__ = ["undisturbed"]  # a fixture


@pytest.mark.timeout(900)
def test_every_pod_is_replaced_under_load(tiny: Path, tmp_path: Path, undisturbed: list[Any]):
    replace_every_pod("gpu", tiny, tmp_path, undisturbed)
