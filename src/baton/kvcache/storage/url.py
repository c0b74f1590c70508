"""`--kv-storage`: the address of a store, taken apart and checked before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from baton.errors import InvalidConfig

EXAMPLES = "file:DIR?quota_gib=20, redis://host:6379/0, mooncake://host:50051"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageURL:
    scheme: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = ""
    path: str = ""
    options: Mapping[str, str]

    def __repr__(self) -> str:  # Without the password: this is what logs and errors show.
        place = f"//{self.host}" + (f":{self.port}" if self.port else "") if self.host else ""
        return f"{self.scheme}:{place}{self.path}"

    def allow(self, *names: str) -> None:
        """Refuses options that the backend does not know: a misspelt quota would be no quota."""
        for name in self.options:
            if name not in names:
                known = ", ".join(names) or "none"
                raise InvalidConfig(f"{self!r} has no option {name}; options of {self.scheme}: {known}")

    def number(self, name: str, default: float, low: float, high: float) -> float:
        text = self.options.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise InvalidConfig(f"{name} of {self!r} is {text}; it must be a number from {low:g} to {high:g}")
        return value


def parse_url(url: str) -> StorageURL:
    """Raises InvalidConfig with what to write instead."""
    parts = urlsplit(url)
    if not parts.scheme:
        raise InvalidConfig(f"a KV storage needs a scheme, for a directory file:{url}; examples: {EXAMPLES}")
    try:
        options = dict(parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True) if parts.query else [])
        port = parts.port
    except ValueError as error:
        raise InvalidConfig(f"the KV storage address {parts.scheme}: cannot be read: {error}; examples: {EXAMPLES}")
    return StorageURL(
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        path=unquote(parts.path),
        options=options,
    )
