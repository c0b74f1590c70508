"""docs/limits.md says what is in force."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from baton.api.limits import Limits
from baton.config import WireConfig

PAGE = Path(__file__).parent.parent.parent / "docs" / "limits.md"


def test_the_page_has_the_values_that_are_in_force():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE.read_text("utf-8"), re.M)
    assert {name: int(value) for name, value in rows} == asdict(Limits()) | asdict(WireConfig())
