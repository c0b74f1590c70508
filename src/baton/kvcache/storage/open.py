"""Opens a backend by the scheme of its address. Other schemes come from entry points (group `baton.kv_storage`)."""

from __future__ import annotations

from importlib.metadata import entry_points

from baton.errors import InvalidConfig
from baton.kvcache.storage.backend import LayoutName, Opener, StorageBackend
from baton.kvcache.storage.url import EXAMPLES, StorageURL, parse_url

GROUP = "baton.kv_storage"


def open_backend(url: str, layout: LayoutName) -> StorageBackend:
    """Raises InvalidConfig for an address that can never work. A store that is only unreachable now is no error here."""
    parsed = parse_url(url)
    return opener(parsed)(parsed, layout)


def check_address(url: str) -> None:
    """Raises InvalidConfig for an address that can never work. Nothing is opened; called before anything is loaded."""
    parsed = parse_url(url)
    opener(parsed)
    if parsed.scheme == "file":
        from baton.kvcache.storage.files import file_settings

        file_settings(parsed)
    elif parsed.scheme in ("redis", "rediss", "redis+unix"):
        from baton.kvcache.storage.redis_store import redis_settings

        redis_settings(parsed)
    elif parsed.scheme == "mooncake":
        from baton.kvcache.storage.mooncake_store import mooncake_settings

        mooncake_settings(parsed)


def opener(url: StorageURL) -> Opener:
    """Imports only the module of the scheme."""
    if url.scheme == "file":
        from baton.kvcache.storage.files import open_files

        return open_files
    if url.scheme in ("redis", "rediss", "redis+unix"):
        from baton.kvcache.storage.redis_store import open_redis

        return open_redis
    if url.scheme == "mooncake":
        from baton.kvcache.storage.mooncake_store import open_mooncake

        return open_mooncake
    for entry in entry_points(group=GROUP, name=url.scheme):
        from baton.kvcache.storage.foreign import foreign_opener

        return foreign_opener(entry)
    installed = ", ".join(sorted(entry.name for entry in entry_points(group=GROUP)))
    raise InvalidConfig(
        f"no KV storage for {url.scheme}: (examples: {EXAMPLES}; by entry points of {GROUP}: {installed or 'none installed'})"
    )
