"""Ranges of what messages carry. A value outside its range is malformed: it ends the session that it came from, before any
decision depends on it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Number of tokens, blocks, slots or sequences."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""It only grows, while its process lives."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Finite: NaN and infinity are outside every range."""

NodeName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
"""Of an instance or a router: ASCII without blanks and control characters, because it stands in logs and labels."""
