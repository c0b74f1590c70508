"""Ranges of values in messages. A value outside its range is malformed: it ends its session, before any decision depends on
it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Number of tokens, blocks, slots or sequences."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number that only grows, while its process lives."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Finite number: NaN and infinity are outside every range."""

NodeName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
"""Name of an instance or a router: ASCII without blanks and control characters, because it appears in logs and labels."""
