"""What the router process is told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import RouterConfig, ServeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterProcessConfig:
    serve: ServeConfig
    "Model (its tokenizer and template), HTTP, keys, logs, times. What is about an engine is not used."
    router: RouterConfig
    listen: str
    "Where instances are expected (addresses.py)."
    secret: str
    "File with the cluster's secret."
