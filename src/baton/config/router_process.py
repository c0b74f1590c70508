"""Settings of the router process."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import CredentialOptions, RouterConfig, ServeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterProcessConfig(CredentialOptions):
    serve: ServeConfig
    "The router's settings: model (its tokenizer and template), HTTP, keys, logs, times. Settings of an engine are not used."
    router: RouterConfig
    listen: str
    "Address where instances dial (addresses.py)."
