"""`--kv-storage`: the address of a store, parsed and checked before anything is opened."""

from __future__ import annotations

import re
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

    def __repr__(self) -> str:  # without the password: logs and errors show this
        place = f"//{self.host}" + (f":{self.port}" if self.port else "") if self.host else ""
        path = self.path if "@" not in self.path else f"***@{self.path.rpartition('@')[2]}"  # written without //
        return f"{self.scheme}:{place}{path}"

    def allow(self, *names: str) -> None:
        """Reject options that the backend does not know: a misspelt quota would be no quota."""
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
    """Parse an address. Raises InvalidConfig with the correct form. For an invalid address only the scheme is shown: its
    password could be anywhere."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", url)
    if scheme is None:
        place = "DIR" if "@" in url else url
        raise InvalidConfig(f"a KV storage needs a scheme, for a directory file:{place}; examples: {EXAMPLES}")
    part = "host"
    try:
        parts = urlsplit(url)
        part = "port"
        port = parts.port
        part = "options (name=value, with & between them)"
        options = dict(parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True) if parts.query else [])
    except ValueError:
        text = f"the KV storage address {scheme[0]}: cannot be read: something is wrong with its {part}"
        raise InvalidConfig(f"{text}; write / @ : of a password as %2F %40 %3A; examples: {EXAMPLES}") from None
    return StorageURL(
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        path=unquote(parts.path),
        options=options,
    )
